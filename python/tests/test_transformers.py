"""Models of transformers with Gatefold's experts: tiny random ones of every family that uses the interface."""
import copy
import inspect
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import gatefold
import gatefold.transformers as gt
from common import TINY

gt.register()
HERE = str(pathlib.Path(__file__).parent)
SMALL = dict(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
             max_position_embeddings=64, head_dim=64)
SPARSE = dict(SMALL, intermediate_size=128, moe_intermediate_size=128, num_experts=6, num_experts_per_tok=2)
QWEN3_NEXT = dict(SPARSE, shared_expert_intermediate_size=64, layer_types=["linear_attention", "full_attention"])
DEEPSEEK = dict(SMALL, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=6, num_experts_per_tok=2,
                first_k_dense_replace=1, n_group=1, topk_group=1, n_shared_experts=1)
LATENT = dict(DEEPSEEK, head_dim=None, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64)
INDEXED = dict(index_n_heads=2, index_head_dim=64, index_topk=16)
FAMILIES = {
    "qwen2_moe": dict(SPARSE, shared_expert_intermediate_size=128),
    "qwen3_moe": SPARSE,
    "mixtral": dict(SMALL, intermediate_size=128, num_local_experts=6, num_experts_per_tok=2),
    "olmoe": dict(SMALL, intermediate_size=128, num_experts=6, num_experts_per_tok=2),
    "gpt_oss": dict(SMALL, intermediate_size=128, num_local_experts=6, num_experts_per_tok=2),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_NEXT,
    "minimax_m2": dict(SMALL, intermediate_size=128, num_local_experts=6, num_experts_per_tok=2),
    "ernie4_5_moe": dict(SMALL, intermediate_size=128, moe_intermediate_size=128, moe_num_experts=6, moe_k=2,
                         moe_num_shared_experts=2, moe_layer_start_index=1),
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": dict(LATENT, **INDEXED),
    "deepseek_v2": dict(LATENT, n_group=2, topk_method="group_limited_greedy", routed_scaling_factor=2.0),
    "deepseek_v3": dict(LATENT, n_group=2),
    "deepseek_v32": dict(LATENT, n_group=2, **INDEXED),
}


def tiny(family, dtype=torch.float32):
    """Weights that bf16 holds exactly, so that only the order of sums differs."""
    torch.manual_seed(0)
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    sizes = {name: size for name, size in FAMILIES[family].items() if size is not None}
    sizes.update(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter in model.parameters():  # some are zero or empty at first
        if parameter.ndim == 3 or parameter.abs().max() == 0 or not parameter.isfinite().all():
            torch.nn.init.normal_(parameter, std=0.1)
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model


IDS = torch.arange(1, 12)[None]
GENERATE = dict(min_new_tokens=4, max_new_tokens=4, do_sample=False)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.double()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def expect_same_bits(a, b):
    """Of all weights; torch's own sums depend on where in memory these lie."""
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(tensor, b.state_dict()[name]) for name, tensor in a.state_dict().items())
    assert relative(logits(a), logits(b)) <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = tiny(family)
    expected = logits(model)
    eager = model.generate(IDS, **GENERATE)
    model.set_experts_implementation("gatefold")
    with pytest.warns(UserWarning, match="rounded to bfloat16"):
        actual = logits(model)
    assert 0 < relative(actual, expected) <= 1e-5 or torch.equal(actual, expected)
    assert any(hasattr(module, "_gatefold_handle") for module in model.modules())
    assert torch.equal(model.generate(IDS, **GENERATE), eager)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_checkpoints(family, tmp_path):
    """What a layer's config and tensors say: routing, shared expert, activation."""
    model = tiny(family)
    for name, bias in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(bias.detach(), std=0.1).copy_(bias.bfloat16())
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path)
    blocks = {name: block for name, block in model.named_modules() if hasattr(getattr(block, "experts", None), "gate_up_proj")}
    for name, block in blocks.items():
        layer = int(name.split("layers.")[1].split(".")[0])
        x = torch.randn(1, 9, 128).bfloat16().float()
        with torch.no_grad():
            y = block(x)
        expected = (y[0] if isinstance(y, tuple) else y).reshape(9, 128)
        experts = gatefold.load_experts(str(tmp_path), layer=layer, precision="f32")
        actual = gatefold.MoePlan.create(experts, max_tokens=9, precision="f32").run(x[0].numpy())
        assert relative(torch.from_numpy(actual).double(), expected.double()) <= 1e-6
    assert blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_families(family, tmp_path):
    """int8 is close; saved and loaded again it has the same bits."""
    model = tiny(family)
    expected = logits(model)
    gt.quantize_(model, "int8")
    assert 0 < relative(logits(model), expected) <= 0.05
    assert model.generate(IDS, **GENERATE).shape == (1, 15)

    source, target = tmp_path / "source", tmp_path / "quantized"
    tiny(family).save_pretrained(source)
    load = transformers.AutoModelForCausalLM.from_pretrained
    on_load = load(source, quantization_config=gt.GatefoldConfig("int8"), dtype=torch.float32)
    expect_same_bits(on_load, model)
    for saved in (on_load, model):
        saved.save_pretrained(target / "on load" if saved is on_load else target / "in place")
    for again in (load(folder, dtype=torch.float32) for folder in target.iterdir()):
        expect_same_bits(again, model)
        assert set(again.config.quantization_config.schemes(again).values()) == {"int8"}


@pytest.mark.parametrize("scheme", ["nvfp4", "uint4_g128", "fp8_block"])
def test_saved_bits_of_other_layouts(scheme, tmp_path):
    tiny("qwen3_moe").save_pretrained(tmp_path / "source")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "source", quantization_config=gt.GatefoldConfig(scheme), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "quantized")
    expect_same_bits(load(tmp_path / "quantized", dtype=torch.bfloat16), model)


def test_weights_that_change_are_packed_again():
    model = tiny("qwen3_moe", torch.bfloat16)
    model.set_experts_implementation("gatefold")
    logits(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    changed = logits(model)
    model.set_experts_implementation("eager")
    assert relative(changed, logits(model)) <= 0.02


def test_some_modules_only(tmp_path):
    model = gt.quantize_(tiny("qwen3_moe"), "mxfp4", modules="model.layers.1.*")
    kinds = [type(layer.mlp.experts).__name__ for layer in model.model.layers]
    assert kinds == ["Qwen3MoeExperts", "QuantizedExperts"]
    copy.deepcopy(model)
    with pytest.raises(gatefold.InvalidArgument, match="no experts modules that match"):
        gt.quantize_(model, "mxfp4", modules=["model.layers.7.*"])
    gt.quantize_(model, "int8")  # the rest
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert [layer.mlp.experts.spec.scheme for layer in again.model.layers] == ["int8", "mxfp4"]
    expect_same_bits(again, model)
    with pytest.raises(gatefold.InvalidArgument, match="no scheme 'int5'"):
        gt.GatefoldConfig("int5")


def test_unknown_activation_is_refused():
    model = tiny("qwen3_moe")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.ReLU()
    with pytest.raises(gatefold.Unsupported, match="activation"):
        gt.quantize_(model, "mxfp4")


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_gatefold_load(family, tmp_path):
    """Experts as quantize_checkpoint wrote them, beside the shared ones of the model."""
    source, written = tmp_path / "source", tmp_path / "written"
    tiny(family, torch.bfloat16).save_pretrained(source)
    gatefold.quantize_checkpoint(str(source), str(written), "int4_g128")
    load = transformers.AutoModelForCausalLM.from_pretrained
    direct = gt.quantize_(load(source, dtype=torch.bfloat16), "int4_g128")
    model = gt.from_pretrained(written, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and torch.equal(logits(model), logits(direct))
    assert torch.equal(logits(gt.load_quantized_(load(source, dtype=torch.bfloat16), written)), logits(direct))
    assert model.generate(IDS, **GENERATE).shape == (1, 15)
    with pytest.raises(RuntimeError, match="the weights are those of .*written"):
        model.state_dict()
    with pytest.raises(ValueError, match="not serializable|gatefold"):
        model.save_pretrained(tmp_path / "again")


def test_checkpoints_with_other_quantized_parts_are_refused(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"rules": [{"modules": ".*experts.*", "scheme": "mxfp4"},
                                            {"modules": ".*self_attn.*", "scheme": "int8"}]}))
    subprocess.run([sys.executable, "-m", "gatefold", "quantize", TINY, tmp_path / "q", "--recipe", recipe], check=True)
    with pytest.raises(gatefold.Unsupported, match="self_attn"):
        gt.from_pretrained(tmp_path / "q")


def fp8_experts(family, fp4=False):
    """transformers' own module for FP8 checkpoints, with weights that it would have loaded; and the same ones in bf16."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    plain = next(m for m in tiny(family, torch.bfloat16).modules() if hasattr(m, "gate_up_proj"))
    config = copy.deepcopy(plain.config)
    config._experts_implementation = "gatefold"
    wrapped = use_experts_implementation(type("Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    config.expert_dtype = "fp4" if fp4 else "fp8"  # which newer releases of transformers are given by itself
    also = {"expert_dtype": config.expert_dtype} if "expert_dtype" in inspect.signature(FP8Experts.__init__).parameters else {}
    module = wrapped(config, block_size=[128, 128], scale_fmt="ue8m0" if fp4 else "float", **also).requires_grad_(False)
    scheme = "mxfp4" if fp4 else "fp8_block_afp8"
    for name in ("gate_up_proj", "down_proj"):
        for expert, w in enumerate(getattr(plain, name).detach()):
            q = gatefold.quantize(w, scheme)
            for to, part in ((getattr(module, name), q.values), (getattr(module, f"{name}_scale_inv"), q.scales)):
                to[expert].view(torch.uint8).copy_(torch.from_numpy(part.copy()).reshape(to[expert].view(torch.uint8).shape))
    return module, gt.QuantizedExperts.of(plain, 2, scheme)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fp8_experts(family, fp4):
    module, expected = fp8_experts(family, fp4)
    x, ids = torch.randn(5, 128).bfloat16(), torch.tensor([[0, 1], [2, 3], [4, 5], [5, 0], [1, 3]])
    w = torch.rand(5, 2)
    assert torch.equal(module(x, ids, w), expected(x, ids, w))


def test_fp8_experts_that_cannot_run():
    x, ids, w = torch.zeros(1, 128).bfloat16(), torch.tensor([[0, 1]]), torch.ones(1, 2)
    for message, change in [("static scales", {"activation_scheme": "static"}), (r"blocks of \[64, 64\]", {"block_size": [64, 64]}),
                            ("2 rows of scales for gate and up of 192 rows, expected 4", {"intermediate_dim": 192})]:
        module = fp8_experts("qwen3_moe")[0]
        vars(module).update(change)
        with pytest.raises(gatefold.Unsupported, match=message):
            module(x, ids, w)


PEAK = """
import sys, threading, torch, transformers, gatefold.transformers as gt
sys.path.insert(0, sys.argv[1])
from common import Peak
load = transformers.AutoModelForCausalLM.from_pretrained
warm = load(sys.argv[2] + "/warm", quantization_config=gt.GatefoldConfig("mxfp4"), dtype=torch.bfloat16)
warm(torch.zeros(1, 1, dtype=int))
how = sys.argv[3]
if how == "in place":
    model = load(sys.argv[2] + "/model", dtype=torch.bfloat16)
with Peak() as peak:
    if how == "in place":
        gt.quantize_(model, "mxfp4")
    else:
        model = load(sys.argv[2] + "/model", dtype=torch.bfloat16,
                     quantization_config=gt.GatefoldConfig("mxfp4"))
print(peak.most, peak.after)
"""


def test_memory(tmp_path):
    """Quantizing, in place or on load, takes no more than a layer's experts beside the model; quantized ones are held once."""
    layers, experts = 6, 16 * 3 * 512 * 512 * 2
    sizes = dict(SPARSE, hidden_size=512, moe_intermediate_size=512, num_experts=16, num_hidden_layers=layers)
    for name, config in (("model", sizes), ("warm", SPARSE)):
        config = transformers.AutoConfig.for_model("qwen3_moe", **config)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / name)
    mapped = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # so that what is freed is given back
    run = lambda how: map(int, subprocess.run([sys.executable, "-c", PEAK, HERE, tmp_path, how], check=True, text=True,
                                              env=mapped, stdout=subprocess.PIPE).stdout.split())
    file = os.path.getsize(tmp_path / "model/model.safetensors")
    for how in ("in place", "on load"):
        most, after = run(how)
        assert most <= experts + (0 if how == "in place" else file)
        after += 0 if how == "on load" else layers * experts
        assert after <= layers * experts * 0.35


def bits_per_byte(model, text):
    with torch.no_grad():
        logits = model(text).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item() / np.log(2)


def test_loss_of_a_trained_model():
    """bf16: the loss of eager within 0.0005 bits per byte."""
    text = torch.tensor(list(open(TINY + "/valid.txt", "rb").read(16384))).reshape(-1, 512)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(TINY, dtype=torch.bfloat16, experts_implementation="eager")
    eager = bits_per_byte(model, text)
    model.set_experts_implementation("gatefold")
    assert abs(bits_per_byte(model, text) - eager) <= 0.0005
    assert abs(bits_per_byte(gt.quantize_(model, "mxfp4"), text) - eager) <= 0.05
