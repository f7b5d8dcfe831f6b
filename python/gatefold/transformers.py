"""Gatefold's experts in transformers models (>= 5.17), in four ways.

As they are loaded, in 16 bit (or, on a GPU, transformers' own FP8 experts):

    gatefold.transformers.register()
    model.set_experts_implementation("gatefold")

A loaded model, quantized in place, layer by layer:

    gatefold.transformers.quantize_(model, "mxfp4")

On load; save_pretrained() and from_pretrained() then give the same bits:

    from_pretrained(..., quantization_config=gatefold.transformers.GatefoldConfig("mxfp4"))

A directory that `gatefold quantize` or quantize_checkpoint wrote, or another one whose experts Gatefold can read:

    model = gatefold.transformers.from_pretrained("Qwen3-30B-A3B-mxfp4")

For every family whose experts modules use transformers' experts interface with a gated activation (Qwen2/3-MoE,
Mixtral, DeepSeek-V3, gpt-oss, OLMoE, GLM-4-MoE, ...). What the activation is is found out by comparing what the module
computes. For inference, without expert parallelism. Models in float32 are run without the roundings to 16 bit.
"""
import copy
import fnmatch
import pathlib
import warnings

import safetensors
import torch
import transformers
from transformers import AutoConfig, GenerationConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _core
from . import torch as _torch

_NAME = "gatefold"


def register():
    """Makes the experts implementation "gatefold" known to transformers, also for FP8 experts. A module's weights are
    packed when it first runs, and again when they have changed as torch counts changes, which leaves out those by way
    of `.data`; the packed weights are held beside the model's own."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(_NAME, _experts_forward)


def quantize_(model, scheme, *, modules=None, scale_search=False, keep_state=True):
    """Replaces the experts modules of a model in place, one after the other, by quantized ones: memory falls as it goes.
    keep_state=False: a model on a GPU cannot be saved, and takes no host memory for that. modules: names of experts modules, or patterns ("model.layers.[0-3].*"); None: all.
    Returns the model. Raises InvalidArgument if there is none, Unsupported for experts that Gatefold cannot run."""
    names = _experts_modules(model, modules)
    _quantize(model, dict.fromkeys(names, scheme), scale_search, keep_state)
    config = getattr(model.config, "quantization_config", None)
    if not isinstance(config, GatefoldConfig):
        config = GatefoldConfig({}, scale_search=scale_search, keep_state=keep_state)
    model.config.quantization_config = config  # for save_pretrained
    config.scheme = config.schemes(model) | dict.fromkeys(names, scheme)
    return model


def _quantize(model, schemes, scale_search, keep_state):
    for name, scheme in schemes.items():
        module = model.get_submodule(name)
        experts = QuantizedExperts.of(module, _top_k(model, module), scheme, scale_search=scale_search)
        if not keep_state:
            experts.drop_state()
        _replace(model, name, experts)
        del module


class QuantizedExperts(_torch.Experts):
    """Takes the place of a model's experts module: the same arguments."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return _torch.fused_experts(hidden_states, top_k_index, top_k_weights, self.handle)

    @classmethod
    def of(cls, module, top_k, scheme, **options):
        return cls.quantize(module.gate_up_proj, module.down_proj, scheme, **_arguments(module, top_k), **options)

    @classmethod
    def empty(cls, module, top_k, scheme):
        """Of the shapes of a module, without weights; pack() says for which device."""
        experts, rows, hidden = module.gate_up_proj.shape
        if module.is_transposed:
            rows, hidden = hidden, rows
        arguments = _arguments(module, top_k)
        spec = _core.MoeSpec(scheme, experts=experts, top_k=top_k, hidden=hidden, intermediate=rows // 2,
                             activation=arguments["activation"], bias=module.has_bias,
                             act_dtype="f16" if module.gate_up_proj.dtype == torch.float16 else "bf16")
        return cls(spec)


@register_quantization_config(_NAME)
class GatefoldConfig(QuantizationConfigMixin):
    """scheme: of the experts (gatefold.schemes()), or {experts module: scheme}. modules, scale_search, keep_state: as for
    quantize_. directory: experts come from there, whatever scheme they are in (from_pretrained() below)."""

    def __init__(self, scheme="mxfp4", modules=None, scale_search=False, keep_state=True, directory=None, **kwargs):
        self.quant_method = _NAME
        self.scheme = scheme
        self.modules = modules
        self.scale_search = scale_search
        self.keep_state = keep_state
        self.directory = directory
        for name in () if directory is not None else scheme.values() if isinstance(scheme, dict) else [scheme]:
            if name not in [row.name for row in _core.schemes()]:
                raise _core.InvalidArgument(f"there is no scheme '{name}'; gatefold.schemes() lists them")

    def schemes(self, model):
        """Of the experts modules of a model that are quantized."""
        if isinstance(self.scheme, dict):
            return self.scheme
        return dict.fromkeys(_experts_modules(model, self.modules), self.scheme)


@register_quantizer(_NAME)
class GatefoldQuantizer(HfQuantizer):
    """Quantizes the experts of a model that has been loaded, or loads quantized ones."""

    def _process_model_before_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        if config.directory is not None:
            self._names = _experts_modules(model, None)
            for name in self._names:
                _replace(model, name, torch.nn.Module())
            return
        config.scheme = config.schemes(model)  # as long as the modules can be found
        if self.pre_quantized:
            for name, scheme in config.scheme.items():
                module = model.get_submodule(name)
                _replace(model, name, QuantizedExperts.empty(module, _top_k(model, module), scheme))

    def _process_model_after_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        if config.directory is not None:
            for name in self._names:
                _replace(model, name, QuantizedExperts.load(config.directory, _layer(name), device=_device_beside(model, name)))
        elif self.pre_quantized:
            for name in config.scheme:
                experts = model.get_submodule(name)
                device = _device_beside(model, name)
                experts.pack(device=device, precision=_precision(model.dtype, device))
                if not config.keep_state:
                    experts.drop_state()
        else:
            _quantize(model, config.scheme, config.scale_search, config.keep_state)
        return model

    def get_new_dtype(self, converter, param, dtype):
        name = str(param.get_dtype() if hasattr(param, "get_dtype") else param.dtype)
        return None if name in ("U8", "torch.uint8") else super().get_new_dtype(converter, param, dtype)

    def is_serializable(self):
        return self.quantization_config.directory is None

    @property
    def is_trainable(self):
        return False

    @property
    def is_compileable(self):
        return True


def from_pretrained(directory, *, model_class=None, config=None, **options):
    """A model whose experts are those of a checkpoint that Gatefold can read (what `gatefold quantize` and
    quantize_checkpoint write, or GPTQ, AWQ, ... ones), as they are stored and never decompressed. options: of
    model_class.from_pretrained; None: the class that the config names. The result cannot be saved: the directory has it. Raises Unsupported if other parts of
    the model are quantized too, BadFile and IoError."""
    config = AutoConfig.from_pretrained(directory) if config is None else copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    rest = {}
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as tensors:
            rest |= {name: tensors.get_tensor(name) for name in tensors.keys() if ".experts." not in name}
    model_class = model_class or getattr(transformers, config.architectures[0])
    model, info = model_class.from_pretrained(None, config=config, state_dict=rest, output_loading_info=True,
                                              quantization_config=GatefoldConfig(None, directory=str(directory)), **options)
    if odd := sorted([*info["unexpected_keys"], *info["missing_keys"]]):
        raise _core.Unsupported(f"{directory}: {type(model).__name__} and the checkpoint differ in {odd[:3]}...: are "
                                "other parts than the routed experts quantized?")
    model.config.name_or_path = str(directory)
    if model.can_generate() and (pathlib.Path(directory) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def load_quantized_(model, directory):
    """Replaces the experts of a model by those of a checkpoint, as from_pretrained() does. The rest of the model is left
    as it is."""
    for name in _experts_modules(model, None):
        weights = model.get_submodule(name).gate_up_proj
        _replace(model, name, QuantizedExperts.load(directory, _layer(name), device=_device(weights)))
        del weights
    return model


def _experts_modules(model, patterns):
    if isinstance(patterns, str):
        patterns = [patterns]
    names = [name for name, module in model.named_modules()
             if all(hasattr(module, what) for what in ("gate_up_proj", "down_proj", "is_transposed", "_apply_gate"))
             and module.gate_up_proj.ndim == 3]
    chosen = [name for name in names
              if patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen:
        raise _core.InvalidArgument(f"{type(model).__name__} has no experts modules" + (
            f" that match {patterns}; it has {names[:3]}..." if names else " of transformers' experts interface"))
    return chosen


def _layer(name):
    return next(int(part) for part in name.split(".") if part.isdigit())


def _device(tensor):
    return str(tensor.device) if tensor.is_cuda else "cpu"


def _device_beside(model, name):
    """Of the block that a module is in: where the loader has put the router."""
    return _device(next(model.get_submodule(name.rpartition(".")[0]).parameters()))


def _replace(model, name, experts):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, experts)


def _top_k(model, module):
    config = model.config.get_text_config()
    for name in ("num_experts_per_tok", "experts_per_token", "num_selected_experts", "moe_topk", "moe_k", "top_k_experts"):
        top_k = getattr(module, "top_k", None) or getattr(config, name, None)
        if isinstance(top_k, int):
            return top_k
    raise _core.Unsupported(f"{type(model.config).__name__} does not say how many experts a token has")


def _arguments(module, top_k):
    """The arguments of Experts.quantize that an experts module gives."""
    if not getattr(module, "has_gate", True):
        raise _core.Unsupported(f"{type(module).__name__} has experts without a gate")
    weights = module.gate_up_proj
    bias = {name: getattr(module, f"{name.removesuffix('_bias')}_proj_bias") if module.has_bias else None
            for name in ("gate_up_bias", "down_bias")}
    device = _device(weights)
    return {"top_k": top_k, "activation": _activation(module), "transposed": module.is_transposed,
            "interleaved": not module.is_concatenated, "device": device, "precision": _precision(weights.dtype, device), **bias}


def _precision(dtype, device):
    return "f32" if dtype == torch.float32 and device == "cpu" else "native"


def _activation(module):
    """Which of Gatefold's activations a module's _apply_gate is: the one that computes the same."""
    infinity = float("inf")
    limits = {float(getattr(module, name)) for name in ("limit", "swiglu_limit")
              if isinstance(getattr(module, name, None), (int, float))} | {infinity}
    alphas = {float(module.alpha)} if isinstance(getattr(module, "alpha", None), (int, float)) else set()
    candidates = [_core.Activation("swiglu", alpha, beta, limit)
                  for alpha in alphas | {1.0} for beta in (0.0, 1.0) for limit in limits]
    candidates += [_core.Activation(kind, limit=limit) for kind in ("geglu", "geglu_tanh") for limit in limits]
    half = 64
    with torch.no_grad(), torch.device("cpu"):
        both = torch.linspace(-12, 12, 2 * half, dtype=torch.float32).roll(17).reshape(1, -1)
        expected = module._apply_gate(both)
        gate, up = (both[:, :half], both[:, half:]) if module.is_concatenated else (both[:, 0::2], both[:, 1::2])
        for activation in candidates:
            if torch.allclose(_compute(activation, gate, up), expected, rtol=1e-5, atol=1e-5):
                return activation
    raise _core.Unsupported(f"{type(module).__name__} has an activation that Gatefold does not know")


def _compute(activation, gate, up):
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "swiglu":
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
    approximate = "tanh" if activation.kind == "geglu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _experts_forward(module, hidden_states, top_k_index, top_k_weights, **kwargs):
    """What transformers calls for experts_implementation="gatefold"."""
    if torch.compiler.is_compiling():
        if not hasattr(module, "_gatefold_handle"):
            raise RuntimeError("run the model once before it is compiled: its experts have not been packed yet")
    elif getattr(module, "_gatefold_of", None) != _versions(module):
        _pack(module, top_k_index.shape[1])
    return _torch.fused_experts(hidden_states, top_k_index, top_k_weights, module._gatefold_handle)


def _versions(module):
    return [(weights.data_ptr(), weights._version) for weights in module.parameters(recurse=False)]


def _pack(module, top_k):
    arguments = _arguments(module, top_k)
    dtype = module.gate_up_proj.dtype
    if hasattr(module, "gate_up_proj_scale_inv"):
        module._gatefold_experts = _pack_fp8(module, arguments)
    else:
        if dtype == torch.float32:
            warnings.warn(f"the float32 weights of {type(module).__name__} are rounded to bfloat16")
        arguments = {name: value.detach() if isinstance(value, torch.Tensor) else value
                     for name, value in arguments.items()}
        module._gatefold_experts = _core.pack(module.gate_up_proj.detach(), module.down_proj.detach(),
                                              "f16" if dtype == torch.float16 else "bf16", **arguments)
    module._gatefold_handle = module._gatefold_experts.handle
    module._gatefold_of = _versions(module)


def _pack_fp8(module, arguments):
    """Of transformers' FP8Experts: e4m3 in blocks of 128 x 128, with activations in e4m3 per token and 128 columns, as its
    own kernels have them; or e2m1 with ue8m0 scales per 32, two in a byte, with 16-bit activations."""
    name = type(module).__name__
    fp4 = module.gate_up_proj.dtype == torch.int8
    if module.activation_scheme != "dynamic":
        raise _core.Unsupported(f"{name} has {module.activation_scheme} scales of activations, expected dynamic ones")
    if not fp4 and tuple(module.block_size or ()) != (128, 128):
        raise _core.Unsupported(f"{name} has blocks of {module.block_size}, expected [128, 128]")
    if fp4 and module.gate_up_proj_scale_inv.element_size() != 1:
        raise _core.Unsupported(f"{name} has scales in {module.gate_up_proj_scale_inv.dtype}, expected float8_e8m0fnu")
    half_rows = module.intermediate_dim if fp4 else -(-module.intermediate_dim // 128)
    if module.gate_up_proj_scale_inv.shape[1] != 2 * half_rows:
        raise _core.Unsupported(f"{name} has {module.gate_up_proj_scale_inv.shape[1]} rows of scales for gate and up of "
                                f"{module.intermediate_dim} rows, expected {2 * half_rows}: one block has rows of both")
    scheme = "mxfp4" if fp4 else "fp8_block_afp8"
    spec = _core.MoeSpec(scheme, experts=module.num_experts, top_k=arguments["top_k"], hidden=module.hidden_dim,
                         intermediate=module.intermediate_dim, activation=arguments["activation"])

    def source(expert, projection):
        stack = "down_proj" if projection == "down" else "gate_up_proj"
        values, scales = (getattr(module, name)[expert].detach() for name in (stack, f"{stack}_scale_inv"))
        if projection != "down":
            values, scales = (both.chunk(2)[projection == "up"] for both in (values, scales))
        scales = scales.view(torch.uint8) if fp4 else scales.float()
        return _core.QuantizedMatrix(scheme, values.shape[0], values.shape[1] * (2 if fp4 else 1),
                                     values.contiguous().view(torch.uint8).cpu(), scales.contiguous().cpu())

    return _core.ExpertWeights.pack(spec, source, device=arguments["device"])
