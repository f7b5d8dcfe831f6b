// Running layers.
#include <fmt/format.h>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include "input_rows.h"
#include "layer.h"
#include "module.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

/// A plan with the experts that it runs.
class Plan {
 public:
  Plan(std::shared_ptr<Layer> layer, const PlanOptions& options)
      : layer_(std::move(layer)),
        options_(options),
        planned_(layer_->weights().spec(), options, layer_->weights().device()) {}

  nb::object run(nb::handle hidden_object, nb::object first, nb::object weights_object,
                 nb::object logits_object, nb::object scales, nb::object token_scales, nb::object out_object,
                 std::optional<std::uintptr_t> stream_number) {
    if (!first.is_none() && weights_object.is_none()) {
      if (!logits_object.is_none()) invalid("router_logits is given twice");
      std::swap(first, logits_object);
    }
    const MoeSpec& spec = planned_.plan().spec();
    const Device& device = planned_.plan().device();
    const Tensor hidden(hidden_object, "hidden");
    const InputRows rows(hidden, device, spec.scheme, spec.hidden, Tensor::maybe(scales, "hidden_scales"),
                         Tensor::maybe(token_scales, "hidden_token_scales"));
    MoeInputs inputs{
        .hidden = rows.x(), .hidden_scales = rows.scales(), .hidden_token_scales = rows.token_scales()};
    const std::int64_t tokens = hidden.size(0);

    const auto logits = Tensor::maybe(logits_object, "router_logits");
    const auto ids = Tensor::maybe(first, "topk_ids");
    const auto weights = Tensor::maybe(weights_object, "topk_weights");
    std::vector<std::int32_t> id_copy;
    std::vector<float> weight_copy, logit_copy;
    if (logits)
      inputs.router_logits = logits->floats({tokens, spec.experts}, "[tokens, experts]", device, &logit_copy);
    if (ids) inputs.topk_ids = ids->integers({tokens, spec.top_k}, "[tokens, top_k]", device, &id_copy);
    if (weights)
      inputs.topk_weights = weights->floats({tokens, spec.top_k}, "[tokens, top_k]", device, &weight_copy);
    if (out_object.is_none())
      out_object = hidden.make({tokens, spec.hidden}, rows.result_type(spec.act_dtype));
    const Tensor out(out_object, "out", true);
    out.expect_shape({tokens, spec.hidden}, "[tokens, hidden]");
    out.expect_device(device);
    const MoeOutputs outputs{.hidden = out.mutable_matrix()};
    const cuda::Stream stream =
        stream_number ? reinterpret_cast<cuda::Stream>(*stream_number) : hidden.stream();
    const nb::gil_scoped_release release;
    planned_.run(layer_->weights(), inputs, outputs, stream, hidden.is_torch() && !stream_number);
    return out_object;
  }

  const MoePlan& plan() const { return planned_.plan(); }
  const std::shared_ptr<Layer>& layer() const { return layer_; }
  PlanOptions options(int tokens) const {
    PlanOptions options = options_;
    options.max_tokens = tokens;
    return options;
  }

 private:
  std::shared_ptr<Layer> layer_;
  PlanOptions options_;
  PlannedLayer planned_;
};

}  // namespace

void add_plan(nb::module_& m) {
  nb::class_<Plan>(
      m, "MoePlan",
      "Chooses the kernel for a layer and runs it. Several threads may call run of one plan at once; "
      "each call has a workspace of its own. A plan keeps its experts alive.")
      .def_static(
          "create",
          [](std::shared_ptr<Layer> experts, int max_tokens, int threads, const std::string& precision,
             bool weights_only, bool batch_invariant, bool fast_accumulation, bool debug_workspace,
             const std::string& kernel) {
            PlanOptions options{.max_tokens = max_tokens,
                                .threads = threads,
                                .precision = to_precision(precision),
                                .weights_only = weights_only,
                                .debug_workspace = debug_workspace,
                                .batch_invariant = batch_invariant,
                                .fast_accumulation = fast_accumulation,
                                .kernel = kernel};
            return std::make_unique<Plan>(std::move(experts), options);
          },
          "experts"_a, nb::kw_only(), "max_tokens"_a = 512, "threads"_a = 0, "precision"_a = "native",
          "weights_only"_a = false, "batch_invariant"_a = false, "fast_accumulation"_a = false,
          "debug_workspace"_a = false, "kernel"_a = "",
          R"(threads 0: OpenMP's default now. precision 'f32': without the roundings to 16 bit. weights_only:
activations stay in 16 bit. batch_invariant: a token has the same bits whatever other tokens are in the call; on a CPU it
always has, on a GPU it costs time where there are few tokens an expert. fast_accumulation: a GPU adds up fp8 by fp8 (scales
per tensor or row), and by int4 in groups of 128 where tokens are many, with about 14 bits, which is faster and off by
1e-3. debug_workspace: canaries around every buffer, and on a GPU ids are checked, for which each call waits. kernel: only those whose name contains this. Kernels are those
that `gatefold tune` found fastest here, if it has been run for this shape. Raises InvalidArgument, Unsupported.)")
      .def(
          "run", &Plan::run, "hidden"_a, "topk_ids"_a = nb::none(), "topk_weights"_a = nb::none(),
          nb::kw_only(), "router_logits"_a = nb::none(), "hidden_scales"_a = nb::none(),
          "hidden_token_scales"_a = nb::none(), "out"_a = nb::none(), "stream"_a = nb::none(),
          nb::sig("def run(self, hidden: object, topk_ids: object = None, topk_weights: object = None, *, "
                  "router_logits: object = None, hidden_scales: object = None, "
                  "hidden_token_scales: object = None, out: object = None, stream: int | None = None) -> "
                  "object"),
          R"(Computes the layer for hidden [tokens, hidden] (f32, f16 or bf16, contiguous, on the plan's device).

run(hidden, topk_ids, topk_weights): ids [tokens, top_k] int32 (CPU: or int64) and weights [tokens, top_k] f32
(CPU: or 16-bit), used as they are. run(hidden, router_logits): logits [tokens, experts]. run(hidden): by the
layer's own router. Returns `out`, or a new tensor like hidden. On a GPU the work is queued in `stream` (a cudaStream_t
as a number); None: in torch's or cupy's current one, the default stream for other tensors. With torch's it can be
captured in a graph.

hidden_scales, on a GPU only: hidden has the codes of the scheme's activations, and these are their scales; both, and
hidden_token_scales where the scheme has them, are what quantize_activation gives, as bytes (uint8) or as what they
are (float8_e4m3fn, int8; float32, float8_e8m0fnu). The same bits as of numbers that are rounded to these codes. Needs
ids or logits; a new result is in act_dtype.

Raises InvalidArgument for a wrong argument, naming it and its values (ids out of range: on a GPU only in plans with
debug_workspace).)")
      .def(
          "describe", [](const Plan& p) { return p.plan().describe(); },
          "Which kernel runs, why others do not, the workspace's buffers.")
      .def(
          "workspace_bytes",
          [](const Plan& p, std::optional<int> tokens) {
            if (!tokens || *tokens == p.plan().max_tokens()) return p.plan().workspace_bytes();
            return value(MoePlan::create(p.plan().spec(), p.options(*tokens), p.plan().device()))
                .workspace_bytes();
          },
          "tokens"_a = nb::none(), "Of this plan, or of one like it for another number of tokens.")
      .def_prop_ro("kernel_name", [](const Plan& p) { return std::string(p.plan().kernel_name()); })
      .def_prop_ro("max_tokens", [](const Plan& p) { return p.plan().max_tokens(); })
      .def_prop_ro("experts", [](const Plan& p) { return p.layer(); });
}

}  // namespace gatefold::python
