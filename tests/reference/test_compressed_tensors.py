"""What `gatefold quantize` writes, read by the packages that define the convention.

For every scheme: compressed-tensors' own decompression of our files gives our weights, bit for bit; and
transformers, with these weights, has the loss that `gatefold eval` reports.

    GATEFOLD_BIN=build/gatefold GATEFOLD_DUMP=build/tests/dump_weights pytest tests/reference

GATEFOLD_WINDOWS: how many windows of 512 bytes of valid.txt the losses are taken over (8).
"""

import json
import math
import os
import pathlib
import subprocess

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize  # noqa: E402
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp  # noqa: E402
from compressed_tensors.utils.match import match_name  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-moe"
BIN = os.environ.get("GATEFOLD_BIN", str(ROOT / "build" / "gatefold"))
DUMP = os.environ.get("GATEFOLD_DUMP", str(pathlib.Path(BIN).parent / "tests" / "dump_weights"))
WINDOW = 512
WINDOWS = int(os.environ.get("GATEFOLD_WINDOWS", "8"))
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

# from_pretrained of this version of transformers cannot load these experts: it knows no zero points, no second
# scale, no blocks and no unpacked integers in a fused MoE layer. compressed-tensors itself does know them.
TRANSFORMERS_CANNOT = ("uint4", "nvfp4", "fp8_block", "int8_aint8", "mxfp8")


def gatefold(*arguments):
    done = subprocess.run([BIN, *map(str, arguments), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def all_schemes():
    if not os.access(BIN, os.X_OK):
        return []
    return [row["name"] for row in gatefold("schemes")["schemes"]]


SCHEMES = all_schemes()


class Stored:
    """A quantized tiny-moe on the disk, and both views of its weights."""

    def __init__(self, scheme, directory):
        self.scheme, self.directory = scheme, directory / scheme
        gatefold("quantize", MODEL, self.directory, "--scheme", scheme)
        self.config = json.loads((self.directory / "config.json").read_text())
        self.tensors = load_file(self.directory / "model.safetensors")
        subprocess.run([DUMP, str(self.directory), str(directory / f"{scheme}.f32")], check=True)
        self.ours = load_file(directory / f"{scheme}.f32" / "model.safetensors")
        self.quantization = self.config.get("quantization_config")

    @property
    def known(self):
        return self.quantization is not None and '"element"' not in json.dumps(self.quantization)

    @property
    def group(self):
        return QuantizationConfig.model_validate(self.quantization).config_groups["group_0"]

    def module(self, key):
        layer, expert, projection = key.split(".")
        prefix = f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[projection]}."
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    directory, cache = tmp_path_factory.mktemp("quantized"), {}

    def get(scheme):
        if scheme not in cache:
            cache[scheme] = Stored(scheme, directory)
        return cache[scheme]

    return get


def assert_same_bits(actual, expected, what):
    view = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    different = (actual.contiguous().view(view) != expected.contiguous().view(view)).sum().item()
    assert different == 0, f"{what}: {different} of {actual.numel()} weights differ"


def decompress_f32(state, group):
    """The package's decompression, without its rounding to 16 bit."""
    compressor = BaseCompressor.get_value_from_registry(group.format)
    if "weight_packed" in state and state["weight_packed"].dtype == torch.uint8:
        rows, columns = state["weight_packed"].shape
        return dequantize(
            unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * columns, torch.float32),
            compressor._decompress_scale(state["weight_scale"], torch.float32),
            args=group.weights,
            global_scale=state.get("weight_global_scale"),
            dtype=torch.float32,
        )
    if state["weight_scale"].dtype == torch.uint8:
        return compressor.decompress(state, group)["weight"].to(torch.float32)  # powers of two: exact
    state["weight_scale"] = state["weight_scale"].to(torch.float32)
    return compressor.decompress(state, group)["weight"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights(stored, scheme):
    model = stored(scheme)
    if model.quantization is None:
        for key, ours in model.ours.items():
            assert_same_bits(model.module(key)["weight"].to(torch.float32), ours, key)
        return
    if not model.known:
        with pytest.raises(Exception, match="element"):  # refused, not misread
            transformers.AutoModelForCausalLM.from_pretrained(model.directory)
        return
    group = model.group
    compressor = BaseCompressor.get_value_from_registry(group.format)
    assert len(model.ours) == 4 * 16 * 3
    for key, ours in model.ours.items():
        assert_same_bits(decompress_f32(model.module(key), group), ours, key)
        rounded = compressor.decompress(model.module(key), group)["weight"]
        assert_same_bits(rounded, ours.to(rounded.dtype), f"{key}, rounded")


def valid_text(windows):
    text = (MODEL / "valid.txt").read_bytes()[: windows * WINDOW]
    assert len(text) == windows * WINDOW
    return text


def bits_per_byte(model, windows=WINDOWS):
    loss = 0.0
    with torch.no_grad():
        for ids in torch.tensor(list(valid_text(windows))).view(windows, 1, WINDOW):  # one at a time: what is quantized together then is the same as ours
            logits = model(ids).logits[0, :-1].float()
            loss += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return loss / (windows * (WINDOW - 1)) / math.log(2)


def load(directory, **arguments):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager", **arguments
    ).eval()


def our_bits_per_byte(directory, tmp_path, *arguments, windows=WINDOWS):
    text = tmp_path / "text"
    text.write_bytes(valid_text(windows))
    return gatefold("eval", directory, "--text", text, *arguments)["bits_per_byte"]


def our_scale(x, args):
    """Dynamic scales as this library takes them where that is not as compressed-tensors does: int8 amax / 127
    (there / 127.5), MX floor(log2(amax)) (there one more from a mantissa of 1.75 on), NVFP4 without a static scale
    relative to one f32 per token (there e4m3 alone). Else None. All three choices are what kernels in use do, and
    they move the loss of tiny-moe by up to 0.0015; so the rounding, clamping and arithmetic are the package's in
    every scheme, and its scales in those that have a scale rule in common."""
    if args.type == "int":
        return x.abs().amax(-1, keepdim=True) / 127
    if args.strategy == "token" or args.scale_dtype is None:
        return None
    blocks = x.unflatten(-1, (-1, args.group_size)).abs().amax(-1)
    if args.scale_dtype == torch.uint8:
        return torch.exp2(torch.floor(torch.log2(blocks)) - 8)
    per_token = x.abs().amax(-1, keepdim=True) / (6 * 448)
    return (blocks / 6 / per_token).to(torch.float8_e4m3fn).float() * per_token


def fake_quantized(x, args):
    x = x.unsqueeze(0)
    scale, zero_point = our_scale(x, args), None
    if scale is None:
        scale, zero_point = compute_dynamic_scales_and_zp(x, args, None)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # of a group of zeros
    return fake_quantize(x, scale, zero_point, args).squeeze(0)


def quantizing_forward(experts, args):
    """Qwen3MoeExperts.forward, with the package's fake quantization of activations before each matrix."""

    def forward(hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        for expert in top_k_index.unique().tolist():
            tokens, slots = torch.where(top_k_index == expert)
            x = fake_quantized(hidden[tokens], args)
            gate, up = torch.nn.functional.linear(x, experts.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = fake_quantized(experts.act_fn(gate) * up, args)
            y = torch.nn.functional.linear(inner, experts.down_proj[expert])
            out.index_add_(0, tokens, y * top_k_weights[tokens, slots, None])
        return out

    return forward


@pytest.fixture(scope="module")
def reference():
    return load(MODEL)


def with_weights(reference, ours, activation=None):
    """The unquantized model with these weights, which test_weights shows to be the packages'."""
    for layer, block in enumerate(reference.model.layers):
        experts = block.mlp.experts
        experts.__dict__.pop("forward", None)
        if activation is not None:
            experts.forward = quantizing_forward(experts, activation)
        for expert in range(experts.num_experts):
            parts = [ours[f"{layer}.{expert}.{name}"] for name in PROJECTIONS]
            experts.gate_up_proj.data[expert] = torch.cat(parts[:2])
            experts.down_proj.data[expert] = parts[2]
    return reference


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss(stored, reference, tmp_path, scheme):
    model = stored(scheme)
    activation = model.group.input_activations if model.known else None
    # Every bit of rounding anywhere flips codes of 4-bit activations: on a short text that is noise of 0.001.
    windows = 8 * WINDOWS if activation is not None and activation.num_bits == 4 else WINDOWS
    theirs = bits_per_byte(with_weights(reference, model.ours, activation), windows)
    ours = our_bits_per_byte(model.directory, tmp_path, windows=windows)
    print(f"{scheme}: theirs {theirs:.5f} ours {ours:.5f}")
    assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_loads_the_directory(stored, tmp_path, scheme):
    model = stored(scheme)
    if model.quantization is not None and (not model.known or scheme.startswith(TRANSFORMERS_CANNOT)):
        pytest.skip("transformers cannot load these experts (docs/checkpoints.md)")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        model.directory, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], problem
    for layer, block in enumerate(loaded.model.layers):
        experts = block.mlp.experts
        for expert in range(experts.num_experts):
            gate_up = torch.cat([model.ours[f"{layer}.{expert}.{name}"] for name in ("gate", "up")])
            dtype = experts.gate_up_proj.dtype
            assert_same_bits(experts.gate_up_proj[expert], gate_up.to(dtype), f"layer {layer} expert {expert}")
            assert_same_bits(experts.down_proj[expert], model.ours[f"{layer}.{expert}.down"].to(dtype), "down")
    # It dequantizes at load time and leaves the activations as they are.
    for parameter in loaded.parameters():
        parameter.data = parameter.data.float()
    theirs = bits_per_byte(loaded.eval())
    ours = our_bits_per_byte(model.directory, tmp_path, "--weights-only")
    print(f"{scheme}: theirs {theirs:.5f} ours {ours:.5f}")
    assert ours == pytest.approx(theirs, abs=1e-3)


class Mixed(Stored):
    """tiny-moe by a recipe."""

    def __init__(self, rules, directory):
        self.directory = directory / "mixed"
        recipe = {"rules": [{"modules": m, "scheme": s} for m, s in rules.items()], "kv_cache": "fp8_e4m3"}
        (directory / "recipe.json").write_text(json.dumps(recipe))
        gatefold("quantize", MODEL, self.directory, "--recipe", directory / "recipe.json")
        self.quantization = json.loads((self.directory / "config.json").read_text())["quantization_config"]
        self.tensors = load_file(self.directory / "model.safetensors")
        subprocess.run([DUMP, str(self.directory), str(directory / "f32")], check=True)
        self.ours = load_file(directory / "f32" / "model.safetensors")


def test_recipe_weights(tmp_path):
    layers = r"model\.layers\.(0|2)\.mlp\.experts\."
    mixed = Mixed({layers: "int4_g32", r".*\.experts\.": "mxfp4", r".*\.o_proj": "fp8_block", ".*": "fp8_channel"}, tmp_path)
    config = QuantizationConfig.model_validate(mixed.quantization)
    formats = set()
    for key, ours in mixed.ours.items():
        layer, expert, projection = key.split(".")
        module = f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[projection]}"
        (group,) = (g for g in config.config_groups.values() if any(match_name(module, t) for t in g.targets))
        formats.add(group.format)
        assert_same_bits(decompress_f32(mixed.module(key), group), ours, key)
    assert formats == {"pack-quantized", "mxfp4-pack-quantized"}


def test_transformers_loads_a_recipe(tmp_path):
    """Experts of one scheme; it would read those of all layers as the first group that it finds."""
    mixed = Mixed({r".*\.experts\.": "mxfp4", ".*": "fp8_channel"}, tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        mixed.directory, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], problem
    for parameter in loaded.parameters():
        parameter.data = parameter.data.float()
    theirs = bits_per_byte(loaded.eval())
    ours = our_bits_per_byte(mixed.directory, tmp_path, "--weights-only")
    print(f"theirs {theirs:.5f} ours {ours:.5f}")
    assert ours == pytest.approx(theirs, abs=1e-3)
