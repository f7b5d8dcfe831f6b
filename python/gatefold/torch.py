"""Operators and a module for torch >= 2.10, on torch's stable ABI.

    torch.ops.gatefold.fused_experts(hidden, topk_ids, topk_weights, experts) -> Tensor
        hidden [tokens, hidden] f32, f16 or bf16; topk_ids [tokens, top_k] int32 (CPU: or int64); topk_weights
        [tokens, top_k] f32 (CPU: or 16-bit), used as they are; experts: ExpertWeights.handle. The result is like hidden.
    torch.ops.gatefold.fused_experts(hidden, topk_ids, topk_weights, experts, width, scales, token_scales, dtype=...)
        The same of hidden states that are quantized already (MoePlan.run's hidden_scales), on a GPU; width: how many columns
        they have. Codes, scales and the result are as below.
    torch.ops.gatefold.quantize_activation(x, scheme) -> (values, scales, token_scales)
        x [rows, k] in the codes of the scheme's activation operand: uint8 [rows, ...] and, for two-level operands,
        f32 [rows] (else empty).
    torch.ops.gatefold.scaled_mm(x, x_scales, x_token_scales, w, w_scales, scheme, w_tensor_scale) -> Tensor
        Quantized activations times a quantized matrix (QuantizedMatrix.values and .scales), f32 [rows, n]; on the CPU.
    torch.ops.gatefold.scaled_mm(x, weights, n, bias, scales, token_scales, dtype=...) -> Tensor
    torch.ops.gatefold.grouped_gemm(x, offsets, weights, n, bias, scales, token_scales, dtype=...) -> Tensor
        LinearPlan's products, on a GPU, by the handle of LinearWeights and their n. Codes come as uint8, int8 or
        float8_e4m3fn, their scales as uint8, float32 or float8_e4m3fn. The result is of dtype, or else of x's; of codes
        bf16. What is not quantized is rounded to f16 if x is f16, else to bf16.

They have meta kernels, work under torch.compile(fullgraph=True), torch.export, autocast and CUDA graphs, and are for
inference: a backward pass raises. Errors are RuntimeErrors with the library's text. Handles are of this process, unless
publish() gave the experts names before an export: then the saved program runs in every process where experts with the
same names have been published.
"""
import torch

from . import _core

_library = torch.library.Library("gatefold", "DEF")
_library.define("fused_experts(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt experts) -> Tensor")
_library.define("fused_experts.quantized(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt experts, SymInt width, "
                "Tensor scales, Tensor? token_scales=None, *, ScalarType? dtype=None) -> Tensor")
_library.define("quantize_activation(Tensor x, str scheme) -> (Tensor, Tensor, Tensor)")
_library.define("scaled_mm(Tensor x, Tensor x_scales, Tensor x_token_scales, Tensor w, Tensor w_scales, str scheme, "
                "float w_tensor_scale) -> Tensor")
_OPTIONS = "Tensor? bias=None, Tensor? scales=None, Tensor? token_scales=None, *, ScalarType? dtype=None"
_library.define(f"scaled_mm.packed(Tensor x, SymInt weights, SymInt n, {_OPTIONS}) -> Tensor")
_library.define(f"grouped_gemm(Tensor x, Tensor offsets, SymInt weights, SymInt n, {_OPTIONS}) -> Tensor")
_core._register_torch_kernels()


@torch.library.register_fake("gatefold::fused_experts")
def _(hidden, topk_ids, topk_weights, experts):
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@torch.library.register_fake("gatefold::fused_experts.quantized")
def _(hidden, topk_ids, topk_weights, experts, width, scales, token_scales=None, *, dtype=None):
    return _product(hidden, width, scales, dtype)


@torch.library.register_fake("gatefold::quantize_activation")
def _(x, scheme):
    values, scales, two_level = _core._activation_row(scheme, x.shape[1])
    return (x.new_empty((x.shape[0], values), dtype=torch.uint8), x.new_empty((x.shape[0], scales), dtype=torch.uint8),
            x.new_empty((x.shape[0] if two_level else 0,), dtype=torch.float32))


@torch.library.register_fake("gatefold::scaled_mm")
def _(x, x_scales, x_token_scales, w, w_scales, scheme, w_tensor_scale):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)


def _product(x, n, scales, dtype):
    return x.new_empty((x.shape[0], n), dtype=dtype or (x.dtype if scales is None else torch.bfloat16))


@torch.library.register_fake("gatefold::scaled_mm.packed")
def _(x, weights, n, bias=None, scales=None, token_scales=None, *, dtype=None):
    return _product(x, n, scales, dtype)


@torch.library.register_fake("gatefold::grouped_gemm")
def _(x, offsets, weights, n, bias=None, scales=None, token_scales=None, *, dtype=None):
    return _product(x, n, scales, dtype)


def _no_backward(name):
    def backward(context, *gradients):
        raise RuntimeError(f"gatefold::{name} is for inference only: it has no gradient")

    torch.library.register_autograd(f"gatefold::{name}", backward)


for _name in ("fused_experts", "fused_experts.quantized", "quantize_activation", "scaled_mm", "scaled_mm.packed",
              "grouped_gemm"):
    _no_backward(_name)


def fused_experts(hidden, topk_ids, topk_weights, handle):
    """torch.ops.gatefold.fused_experts for tensors that are not contiguous, int32 and f32 where it wants them so."""
    if hidden.is_cuda:
        topk_ids, topk_weights = topk_ids.to(torch.int32), topk_weights.float()
    return torch.ops.gatefold.fused_experts(hidden.contiguous(), topk_ids.contiguous(), topk_weights.contiguous(), handle)


def debug(on=True):
    """Lets the operators look for what else they cannot see: on a GPU for ids out of range, and everywhere for writes
    beyond the buffers. Slow: each call waits for the GPU, and none can be captured in a graph."""
    _core._debug_torch_kernels(on)


def publish(module):
    """Names all Experts in a module (a model) by their place in it, so that a program exported from it can be saved:

        publish(model); torch.export.save(torch.export.export(model, inputs), "model.pt2")
        publish(model); program = torch.export.load("model.pt2")                # elsewhere, with the same experts
    """
    for name, part in module.named_modules():
        if isinstance(part, Experts):
            part.publish(name)


class Experts(torch.nn.Module):
    """The routed experts of one layer: forward(hidden, topk_ids, topk_weights) -> Tensor.

    Made by Experts.quantize(gate_up, down, scheme, top_k=...). state_dict() holds the quantized weights in the
    canonical layout, as bytes and scales, expert by expert (_PARTS); load_state_dict() packs them again. On the CPU
    state_dict() makes them from the packed weights, which alone are held. Those of a GPU do not give all bits back: the
    canonical ones are held beside them, in host memory, until drop_state() is called. `.to()` refuses other devices:
    weights are packed for one.
    """

    _PARTS = ("values", "scales", "zero_points", "tensor_scales")
    _directory = None

    def __init__(self, spec, *, device="cpu", precision="native", weights_only=False, batch_invariant=False,
                 fast_accumulation=False):
        """Without weights: load_state_dict() brings them. spec: gatefold.MoeSpec; the rest as for gatefold.pack."""
        super().__init__()
        self.spec = spec
        self._options = {"device": device, "precision": precision, "weights_only": weights_only,
                         "batch_invariant": batch_invariant, "fast_accumulation": fast_accumulation}
        self._forget_weights()
        self._allocate()
        if spec.bias:
            self.register_buffer("gate_up_bias", torch.zeros(spec.experts, 2 * spec.intermediate))
            self.register_buffer("down_bias", torch.zeros(spec.experts, spec.hidden))

    @classmethod
    def quantize(cls, gate_up, down, scheme, *, top_k, activation=None, gate_up_bias=None, down_bias=None,
                 act_dtype=None, ep_size=1, interleaved=False, transposed=False, scale_search=False, **options):
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
                             activation=activation or _core.Activation(), act_dtype=act_dtype, ep_size=ep_size,
                             bias=gate_up_bias is not None or down_bias is not None)
        self = cls(spec, **options)
        if gate_up_bias is not None:
            bias = gate_up_bias.detach().float().cpu()
            if interleaved:
                bias = torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1)
            self.gate_up_bias.copy_(bias)
        if down_bias is not None:
            self.down_bias.copy_(down_bias.detach())
        half = rows // 2
        slices = {"gate": slice(0, rows, 2) if interleaved else slice(0, half),
                  "up": slice(1, rows, 2) if interleaved else slice(half, rows)}

        stacks = dict(self.named_buffers(recurse=False))

        def source(expert, projection):
            weights = down[expert] if projection == "down" else gate_up[expert, slices[projection]]
            matrix = _core.quantize(weights.contiguous().cpu(), scheme, scale_search=scale_search)
            if self._keeps_state():
                self._store(expert, projection, matrix, stacks)
            return matrix

        self._pack(source)
        return self

    @classmethod
    def load(cls, directory, layer, scheme=None, **options):
        """The routed experts of a layer of a checkpoint: the arguments are those of gatefold.load_experts. Without
        state_dict(): the checkpoint has the weights."""
        weights = _core.load_experts(str(directory), layer, scheme, shared_expert=False, **options)
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self.spec = weights.spec
        self._options = {"device": "cpu", **options}
        self._directory = str(directory)
        self._use(weights)
        return self

    def _shapes(self):
        s = self.spec
        return {"gate": (s.intermediate, s.hidden), "up": (s.intermediate, s.hidden), "down": (s.hidden, s.intermediate)}

    def _stacks(self):
        """Name, shape and type of all that the canonical layout has."""
        for projection, (n, k) in self._shapes().items():
            for part, shape in _core._matrix_parts(self.spec.scheme, n, k).items():
                dtype = torch.float32 if part == "tensor_scales" else torch.uint8
                yield f"{projection}_{part}", (self.spec.experts, *shape), dtype

    def _allocate(self):
        for name, shape, dtype in self._stacks():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))

    def _keeps_state(self):
        return torch.device(self._options["device"]).type != "cpu"

    def _has_state(self):
        return hasattr(self, "gate_values")

    def _store(self, expert, projection, matrix, stacks):
        for part in _core._matrix_parts(self.spec.scheme, *self._shapes()[projection]):
            if part == "tensor_scales":
                tensor = torch.tensor([matrix.tensor_scale, float(matrix.tensor_scale_divides)])
            else:
                tensor = torch.from_numpy(getattr(matrix, part).copy())
            stacks[f"{projection}_{part}"][expert] = tensor

    def _matrix(self, expert, projection):
        """Out of the buffers."""
        parts = {part: getattr(self, f"{projection}_{part}", None) for part in self._PARTS}
        parts = {part: None if stack is None else stack[expert].cpu() for part, stack in parts.items()}
        scale = parts.pop("tensor_scales")
        return _core.QuantizedMatrix(self.spec.scheme, *self._shapes()[projection], *parts.values(),
                                     None if scale is None else float(scale[0]),
                                     False if scale is None else bool(scale[1]))

    def pack(self, **options):
        """Packs the weights in the buffers, where something else than load_state_dict() has put them. options: those of
        the constructor that are not to be as they were."""
        self._options |= options
        self._pack(self._matrix)

    def _pack(self, source):
        self._forget_weights()
        biases = {name: getattr(self, name).float().cpu() for name in ("gate_up_bias", "down_bias") if self.spec.bias}
        self._use(_core.ExpertWeights.pack(self.spec, source, **biases, **self._options))
        if self._keeps_state():
            for name, _, _ in self._stacks():
                setattr(self, name, getattr(self, name).cpu())
        else:
            self.drop_state()

    def _forget_weights(self):
        self.experts, self.handle = None, 0

    def _use(self, weights):
        self.experts, self.handle = weights, weights.handle

    def publish(self, name):
        """Gives the experts a handle that follows from the name: programs that are exported then can be saved, and run
        where experts of the same name are. Raises InvalidArgument if other experts of this process have it."""
        self.handle = self.experts.publish(name)

    def drop_state(self):
        """Frees the canonical weights that are held beside those of a GPU: then state_dict() raises."""
        for name, _, _ in self._stacks() if self._has_state() else ():
            delattr(self, name)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self._directory is not None:
            raise RuntimeError(f"{prefix[:-1] or 'Experts'}: the weights are those of {self._directory}")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._has_state():
            return
        stacks = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in self._stacks()}
        for expert in range(self.spec.experts):
            for projection in self._shapes():
                try:
                    matrix = self.experts.matrix(expert, projection)
                except _core.Unsupported as error:
                    raise RuntimeError(f"{prefix[:-1] or 'Experts'}: the weights were dropped: {error}") from None
                self._store(expert, projection, matrix, stacks)
        destination.update((prefix + name, stack) for name, stack in stacks.items())

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        if not self._has_state():
            self._allocate()
        before = len(missing) + len(errors)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if len(missing) + len(errors) == before:
            self.pack()

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
        return fused_experts(hidden, topk_ids, topk_weights, self.handle)

    def extra_repr(self):
        s = self.spec
        return f"{s.scheme}, {s.experts} experts, top {s.top_k}, hidden {s.hidden}, intermediate {s.intermediate}"
