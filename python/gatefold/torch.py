"""Operators and a module for torch >= 2.10, on torch's stable ABI.

    torch.ops.gatefold.fused_experts(hidden, topk_ids, topk_weights, experts) -> Tensor
        hidden [tokens, hidden] f32, f16 or bf16; topk_ids [tokens, top_k] int32 (CPU: or int64); topk_weights
        [tokens, top_k] f32 (CPU: or 16-bit), used as they are; experts: ExpertWeights.handle. The result is like hidden.
    torch.ops.gatefold.quantize_activation(x, scheme) -> (values, scales, token_scales)
        x [rows, k] in the codes of the scheme's activation operand: uint8 [rows, ...] and, for two-level operands,
        f32 [rows] (else empty).
    torch.ops.gatefold.scaled_mm(x, x_scales, x_token_scales, w, w_scales, scheme, w_tensor_scale) -> Tensor
        Quantized activations times a quantized matrix (QuantizedMatrix.values and .scales), f32 [rows, n]; on the CPU.

They have meta kernels, work under torch.compile(fullgraph=True), torch.export, autocast and CUDA graphs, and are for
inference: a backward pass raises. Handles are of this process: an exported program that is saved cannot be loaded in
another one. Errors are RuntimeErrors with the library's text.
"""
import torch

from . import _core

_library = torch.library.Library("gatefold", "DEF")
_library.define("fused_experts(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt experts) -> Tensor")
_library.define("quantize_activation(Tensor x, str scheme) -> (Tensor, Tensor, Tensor)")
_library.define("scaled_mm(Tensor x, Tensor x_scales, Tensor x_token_scales, Tensor w, Tensor w_scales, str scheme, "
                "float w_tensor_scale) -> Tensor")
_core._register_torch_kernels()


@torch.library.register_fake("gatefold::fused_experts")
def _(hidden, topk_ids, topk_weights, experts):
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@torch.library.register_fake("gatefold::quantize_activation")
def _(x, scheme):
    values, scales, two_level = _core._activation_row(scheme, x.shape[1])
    return (x.new_empty((x.shape[0], values), dtype=torch.uint8), x.new_empty((x.shape[0], scales), dtype=torch.uint8),
            x.new_empty((x.shape[0] if two_level else 0,), dtype=torch.float32))


@torch.library.register_fake("gatefold::scaled_mm")
def _(x, x_scales, x_token_scales, w, w_scales, scheme, w_tensor_scale):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)


def _no_backward(name):
    def backward(context, *gradients):
        raise RuntimeError(f"gatefold::{name} is for inference only: it has no gradient")

    torch.library.register_autograd(f"gatefold::{name}", backward)


for _name in ("fused_experts", "quantize_activation", "scaled_mm"):
    _no_backward(_name)


class Experts(torch.nn.Module):
    """The routed experts of one layer: forward(hidden, topk_ids, topk_weights) -> Tensor.

    Made by Experts.quantize(gate_up, down, scheme, top_k=...). state_dict() holds the quantized weights in the
    canonical layout, as bytes and scales, expert by expert (_PARTS); load_state_dict() packs them again. They are held
    beside the packed weights until drop_state() is called. `.to()` refuses other devices and types: weights are packed
    for one.
    """

    _PARTS = ("values", "scales", "zero_points", "tensor_scales")

    def __init__(self, spec, *, device="cpu", precision="native", weights_only=False):
        """Without weights: load_state_dict() brings them. spec: gatefold.MoeSpec."""
        super().__init__()
        self.spec = spec
        self._options = {"device": device, "precision": precision, "weights_only": weights_only}
        self.experts = None
        self.handle = 0
        for projection, n, k in self._shapes():
            for part, shape in _core._matrix_parts(spec.scheme, n, k).items():
                dtype = torch.float32 if part == "tensor_scales" else torch.uint8
                self.register_buffer(f"{projection}_{part}", torch.empty((spec.experts, *shape), dtype=dtype))
        if spec.bias:
            self.register_buffer("gate_up_bias", torch.zeros(spec.experts, 2 * spec.intermediate))
            self.register_buffer("down_bias", torch.zeros(spec.experts, spec.hidden))

    @classmethod
    def quantize(cls, gate_up, down, scheme, *, top_k, activation=None, gate_up_bias=None, down_bias=None,
                 act_dtype=None, interleaved=False, transposed=False, scale_search=False, device="cpu",
                 precision="native", weights_only=False):
        """From gate_up [experts, 2 * intermediate, hidden] and down [experts, hidden, intermediate]; the arguments are
        those of gatefold.pack. Reads one matrix at a time."""
        gate_up, down = gate_up.detach(), down.detach()
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        if gate_up.ndim != 3 or down.shape != (gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // 2):
            raise _core.InvalidArgument(f"gate_up is {list(gate_up.shape)} and down {list(down.shape)}, expected "
                                        "[experts, 2 * intermediate, hidden] and [experts, hidden, intermediate]")
        experts, rows, hidden = gate_up.shape
        if act_dtype is None:
            act_dtype = "f16" if gate_up.dtype == torch.float16 else "bf16"
        spec = _core.MoeSpec(scheme, experts=experts, top_k=top_k, hidden=hidden, intermediate=rows // 2,
                             activation=activation or _core.Activation(), act_dtype=act_dtype,
                             bias=gate_up_bias is not None or down_bias is not None)
        self = cls(spec, device=device, precision=precision, weights_only=weights_only)
        if spec.bias:
            bias = gate_up_bias.detach().float().cpu()
            if interleaved:
                bias = torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1)
            self.gate_up_bias.copy_(bias)
            self.down_bias.copy_(down_bias.detach())
        half = rows // 2
        slices = {"gate": slice(0, rows, 2) if interleaved else slice(0, half),
                  "up": slice(1, rows, 2) if interleaved else slice(half, rows)}

        def source(expert, projection):
            weights = down[expert] if projection == "down" else gate_up[expert, slices[projection]]
            matrix = _core.quantize(weights.contiguous().cpu(), scheme, scale_search=scale_search)
            for part, tensor in self._parts_of(matrix).items():
                getattr(self, f"{projection}_{part}")[expert] = tensor
            return matrix

        self._pack(source)
        return self

    def _shapes(self):
        s = self.spec
        return (("gate", s.intermediate, s.hidden), ("up", s.intermediate, s.hidden), ("down", s.hidden, s.intermediate))

    @staticmethod
    def _parts_of(matrix):
        """What is stored of a QuantizedMatrix: only parts that its scheme has."""
        parts = {part: torch.from_numpy(getattr(matrix, part).copy())
                 for part in ("values", "scales", "zero_points") if getattr(matrix, part).size}
        if matrix.tensor_scale is not None:
            parts["tensor_scales"] = torch.tensor([matrix.tensor_scale, float(matrix.tensor_scale_divides)])
        return parts

    def _matrix(self, expert, projection):
        n, k = next((n, k) for name, n, k in self._shapes() if name == projection)
        parts = {part: getattr(self, f"{projection}_{part}", None) for part in self._PARTS}
        parts = {part: None if stack is None else stack[expert].cpu() for part, stack in parts.items()}
        scale = parts.pop("tensor_scales")
        return _core.QuantizedMatrix(self.spec.scheme, n, k, *parts.values(),
                                     None if scale is None else float(scale[0]),
                                     False if scale is None else bool(scale[1]))

    def pack(self):
        """Packs the weights in the buffers: after they have been changed other than by load_state_dict()."""
        self._pack(self._matrix)

    def _pack(self, source):
        biases = {name: getattr(self, name).float().cpu() for name in ("gate_up_bias", "down_bias") if self.spec.bias}
        self.experts = _core.ExpertWeights.pack(self.spec, source, **biases, **self._options)
        self.handle = self.experts.handle

    def drop_state(self):
        """Frees the canonical weights: then only the packed ones are held, and state_dict() raises."""
        for name in [name for name, _ in self.named_buffers(recurse=False)]:
            delattr(self, name)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if not hasattr(self, "gate_values"):
            raise RuntimeError(f"{prefix[:-1] or 'Experts'}: the weights were dropped by drop_state()")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        before = len(missing) + len(errors)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if len(missing) + len(errors) == before:
            self._pack(self._matrix)

    def _apply(self, function, recurse=True):
        probe = function(torch.zeros(1, dtype=torch.uint8))
        if probe.device.type != torch.device(self._options["device"]).type:
            raise RuntimeError(f"these experts are packed for {self._options['device']} and cannot be moved to "
                               f"{probe.device}: make them for that device")
        return self  # the weights have types of their own: .half() and .bfloat16() say nothing about them

    def forward(self, hidden, topk_ids, topk_weights):
        """hidden [tokens, hidden]; topk_ids, topk_weights [tokens, top_k]. Raises RuntimeError if a gradient would be
        needed, and for wrong shapes, types, devices and (on the CPU) ids."""
        if torch.is_grad_enabled() and (hidden.requires_grad or topk_weights.requires_grad):
            raise RuntimeError("hidden or topk_weights requires a gradient, but Experts is for inference only: use "
                               "torch.no_grad() or detach()")
        return torch.ops.gatefold.fused_experts(hidden.contiguous(), topk_ids, topk_weights, self.handle)

    def extra_repr(self):
        s = self.spec
        return f"{s.scheme}, {s.experts} experts, top {s.top_k}, hidden {s.hidden}, intermediate {s.intermediate}"
