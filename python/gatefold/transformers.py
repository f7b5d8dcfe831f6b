"""Gatefold's experts in transformers models (>= 5.17), in three ways.

As they are loaded, in 16 bit:

    gatefold.transformers.register()
    model.set_experts_implementation("gatefold")

A loaded model, quantized in place, layer by layer:

    gatefold.transformers.quantize_(model, "mxfp4")

On load; save_pretrained() and from_pretrained() then give the same bits:

    from_pretrained(..., quantization_config=gatefold.transformers.GatefoldConfig("mxfp4"))

For every family whose experts modules use transformers' experts interface with a gated activation (Qwen2/3-MoE,
Mixtral, DeepSeek-V3, gpt-oss, OLMoE, GLM-4-MoE, ...). What the activation is is found out by comparing what the module
computes. For inference, without expert parallelism. Models in float32 are run without the roundings to 16 bit.
"""
import fnmatch
import warnings

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _core
from . import torch as _torch

_NAME = "gatefold"


def register():
    """Makes the experts implementation "gatefold" known to transformers. A module's weights are packed when it first
    runs, and again when they have changed; the packed weights are held beside the model's own."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts_forward)


def quantize_(model, scheme, *, modules=None, scale_search=False, keep_state=True):
    """Replaces the experts modules of a model in place, one after the other, by quantized ones: memory falls as it goes
    if the scheme's weights, held twice, are smaller than the model's. keep_state=False: they are held once, packed, and
    the model cannot be saved. modules: names of experts modules, or patterns ("model.layers.[0-3].*"); None: all.
    Returns the model. Raises InvalidArgument if there is none, Unsupported for experts that Gatefold cannot run."""
    for name in _experts_modules(model, modules):
        module = model.get_submodule(name)
        experts = QuantizedExperts.of(module, _top_k(model, module), scheme, scale_search=scale_search)
        if not keep_state:
            experts.drop_state()
        _replace(model, name, experts)
        del module
    return model


class QuantizedExperts(_torch.Experts):
    """Takes the place of a model's experts module: the same arguments."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return torch.ops.gatefold.fused_experts(hidden_states.contiguous(), top_k_index, top_k_weights, self.handle)

    @classmethod
    def of(cls, module, top_k, scheme, **options):
        return cls.quantize(module.gate_up_proj, module.down_proj, scheme, **_arguments(module, top_k), **options)

    @classmethod
    def empty(cls, module, top_k, scheme):
        """Of the shapes of a module, without weights."""
        experts, rows, hidden = module.gate_up_proj.shape
        if module.is_transposed:
            rows, hidden = hidden, rows
        arguments = _arguments(module, top_k)
        spec = _core.MoeSpec(scheme, experts=experts, top_k=top_k, hidden=hidden, intermediate=rows // 2,
                             activation=arguments["activation"], bias=module.has_bias,
                             act_dtype="f16" if module.gate_up_proj.dtype == torch.float16 else "bf16")
        return cls(spec, device=arguments["device"], precision=arguments["precision"])


@register_quantization_config(_NAME)
class GatefoldConfig(QuantizationConfigMixin):
    """scheme: of the experts (gatefold.schemes()). modules, scale_search: as for quantize_."""

    def __init__(self, scheme="mxfp4", modules=None, scale_search=False, **kwargs):
        self.quant_method = _NAME
        self.scheme = scheme
        self.modules = modules
        self.scale_search = scale_search
        if scheme not in [row.name for row in _core.schemes()]:
            raise _core.InvalidArgument(f"there is no scheme '{scheme}'; gatefold.schemes() lists them")


@register_quantizer(_NAME)
class GatefoldQuantizer(HfQuantizer):
    """Quantizes the experts of a model that has been loaded, or loads quantized ones."""

    def _process_model_before_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        for name in _experts_modules(model, config.modules) if self.pre_quantized else ():
            module = model.get_submodule(name)
            _replace(model, name, QuantizedExperts.empty(module, _top_k(model, module), config.scheme))

    def _process_model_after_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        if self.pre_quantized:
            for module in model.modules():
                if isinstance(module, QuantizedExperts):
                    module.pack()
            return model
        return quantize_(model, config.scheme, modules=config.modules, scale_search=config.scale_search)

    def get_new_dtype(self, converter, param, dtype):
        name = str(param.get_dtype() if hasattr(param, "get_dtype") else param.dtype)
        return None if name in ("U8", "torch.uint8") else super().get_new_dtype(converter, param, dtype)

    def is_serializable(self):
        return True

    @property
    def is_trainable(self):
        return False

    @property
    def is_compileable(self):
        return True


def load_quantized_(model, directory):
    """Replaces the experts of a model by those of a checkpoint that Gatefold can read (what `gatefold quantize` and
    quantize_checkpoint write, or GPTQ, AWQ, ... ones), as they are stored and without decompressing them. The rest of
    the model is left as it is. state_dict() is not available for them: the checkpoint has them."""
    for name in _experts_modules(model, None):
        module = model.get_submodule(name)
        layer = next(int(part) for part in name.split(".") if part.isdigit())
        weights = _core.load_experts(str(directory), layer)
        experts = QuantizedExperts.__new__(QuantizedExperts)
        torch.nn.Module.__init__(experts)
        experts.spec, experts.experts, experts.handle = weights.spec, weights, weights.handle
        experts._options = {"device": "cpu"}
        _replace(model, name, experts)
        del module
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
    return {"top_k": top_k, "activation": _activation(module), "transposed": module.is_transposed,
            "interleaved": not module.is_concatenated, "device": "cuda" if weights.is_cuda else "cpu",
            "precision": "f32" if weights.dtype == torch.float32 else "native", **bias}


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
    return torch.ops.gatefold.fused_experts(hidden_states.contiguous(), top_k_index, top_k_weights,
                                            module._gatefold_handle)


def _versions(module):
    return [(weights.data_ptr(), weights._version) for weights in (module.gate_up_proj, module.down_proj)]


def _pack(module, top_k):
    arguments = _arguments(module, top_k)
    dtype = module.gate_up_proj.dtype
    if dtype == torch.float32:
        warnings.warn(f"the float32 weights of {type(module).__name__} are rounded to bfloat16")
    arguments = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    module._gatefold_experts = _core.pack(module.gate_up_proj.detach(), module.down_proj.detach(),
                                          "f16" if dtype == torch.float16 else "bf16", **arguments)
    module._gatefold_handle = module._gatefold_experts.handle
    module._gatefold_of = _versions(module)
