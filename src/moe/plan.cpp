#include <fmt/format.h>
#include <omp.h>

#include "format/code_rows.h"
#include "moe/kernel.h"
#include "moe/ordered_layer.h"
#include "moe/tuning_file.h"

namespace gatefold {

struct MoePlan::State {
  MoeSpec spec;
  PlanOptions options;
  Device device;
  const KernelInfo* kernel = nullptr;
  CpuTuning tuning[kTokenClasses];
  std::shared_ptr<const KernelPlan> prepared;
  WorkspaceLayout layout;
  std::optional<OrderedLayer> ordered;
  std::vector<std::string> refused;  ///< the other kernels, and why they do not run
};

Operand effective_activation(SchemeId id, const MoeSpec& spec, const PlanOptions& options) {
  const Scheme& row = scheme(id);
  if (row.quantizes_activations() && !options.weights_only) {
    Operand activation = row.activation;
    activation.rule = spec.activation_rule;
    return activation;
  }
  if (options.precision == Precision::f32) return {};
  return operands::plain(spec.act_dtype == DType::f16 ? formats::f16 : formats::bf16);
}

namespace {

/// What no kernel of a GPU does.
std::string gpu_refuses(const MoeSpec& spec) {
  if (spec.activation_rule != ScaleRule::standard && scheme(spec.scheme).quantizes_activations())
    return "activation scales by another software's rule are for CPUs only";
  return {};
}

}  // namespace

const KernelInfo* choose_kernel(const MoeSpec& spec, const PlanOptions& options, const Device& device,
                                std::vector<std::string>* refused) {
  const KernelInfo* chosen = nullptr;
  for (const KernelInfo& kernel : device.kind == Device::Kind::cpu ? cpu_kernels() : cuda_kernels()) {
    if (kernel.scheme != spec.scheme) continue;
    std::string why = device.kind == Device::Kind::cuda ? gpu_refuses(spec) : "";
    if (why.empty()) why = kernel.refuses(spec, options, device);
    if (why.empty() && kernel.name.find(options.kernel) == std::string::npos)
      why = fmt::format("the caller asks for '{}'", options.kernel);
    if (why.empty() && chosen != nullptr) why = "a better one runs";
    if (why.empty())
      chosen = &kernel;
    else if (refused != nullptr)
      refused->push_back(fmt::format("{}: {}", kernel.name, why));
  }
  return chosen;
}

namespace {

/// What tune() found for a layer on a GPU.
CudaTunings installed_tuning(const MoeSpec& spec, const PlanOptions& options, const Device& device) {
  CudaTunings tunings;
  const auto info = cuda::device_info(device.index);
  for (int i = 0; info && i < kCudaTokenClasses; ++i)
    if (const CudaTuning* found = TuningFile::installed().find(
            TuningFile::cuda_key(spec, info->name, i, options.fast_accumulation)))
      tunings[static_cast<std::size_t>(i)] = *found;
  return tunings;
}

}  // namespace

Result<MoePlan> MoePlan::create(const MoeSpec& spec, const PlanOptions& options, const Device& device) {
  if (Status status = spec.validate(); !status.ok()) return status;
  if (options.max_tokens <= 0 || options.max_tokens > (1 << 24))
    return Status(Code::invalid_argument,
                  fmt::format("max_tokens = {} is not within 1..{}", options.max_tokens, 1 << 24));
  if (options.threads < 0)
    return Status(Code::invalid_argument, fmt::format("threads = {}", options.threads));

  auto state = std::make_shared<State>();
  state->spec = spec;
  state->options = options;
  state->device = device;
  if (state->options.threads == 0) state->options.threads = omp_get_max_threads();
  state->kernel = choose_kernel(spec, state->options, device, &state->refused);
  if (state->kernel == nullptr)
    return Status(Code::unsupported, fmt::format("no kernel for {}: {}", scheme(spec.scheme).name,
                                                 fmt::join(state->refused, "; ")));
  for (int tokens = 0; tokens < kTokenClasses; ++tokens) {
    const CpuTuning* tuned =
        TuningFile::installed().find(TuningFile::key(spec, state->options.threads, tokens));
    state->tuning[tokens] = options.tuning ? *options.tuning : tuned != nullptr ? *tuned : CpuTuning{};
  }
  state->layout = WorkspaceLayout(options.debug_workspace);
  if (spec.ordered_inputs && device.kind == Device::Kind::cpu)
    state->ordered = OrderedLayer(*state->kernel, spec, state->options, state->layout);
  else
    state->kernel->workspace(spec, state->options, state->layout);
  if (state->kernel->prepare != nullptr) {
    auto prepared =
        state->kernel->prepare(spec, state->options, device, installed_tuning(spec, options, device));
    if (!prepared) return prepared.status();
    state->prepared = std::move(*prepared);
  }
  return MoePlan(std::move(state));
}

std::size_t MoePlan::workspace_bytes() const {
  return state_->layout.bytes();
}
std::string_view MoePlan::kernel_name() const {
  return state_->kernel->name;
}
const MoeSpec& MoePlan::spec() const {
  return state_->spec;
}
const Device& MoePlan::device() const {
  return state_->device;
}
int MoePlan::max_tokens() const {
  return state_->options.max_tokens;
}
std::vector<CudaCandidate> MoePlan::candidates(int tokens) const {
  return state_->prepared == nullptr ? std::vector<CudaCandidate>() : state_->prepared->candidates(tokens);
}

namespace {

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

bool same(const MoeSpec& a, const MoeSpec& b) {
  return a.scheme == b.scheme && a.experts == b.experts && a.hidden == b.hidden &&
         a.intermediate == b.intermediate && a.shared.intermediate == b.shared.intermediate &&
         a.shared.gated == b.shared.gated && a.shared.scheme == b.shared.scheme && a.bias == b.bias &&
         a.ordered_inputs == b.ordered_inputs && a.routing.correction_bias == b.routing.correction_bias;
}

Status check_ids(const MoeSpec& spec, const std::int32_t* ids, std::int64_t tokens) {
  if (spec.ep_size > 1) return {};  // those of other parts may be anything
  for (std::int64_t slot = 0; slot < tokens * spec.top_k; ++slot)
    if (ids[slot] < 0 || ids[slot] >= spec.experts)
      return {Code::invalid_argument,
              fmt::format("topk_ids[{}, {}] = {} is not within 0..{}", slot / spec.top_k, slot % spec.top_k,
                          ids[slot], spec.experts - 1)};
  return {};
}

/// Why a call cannot have hidden states that are quantized already, in words; empty if it can.
std::string refuses_codes(const MoeSpec& spec, const PlanOptions& options, const Device& device,
                          const MoeInputs& in) {
  if (device.kind != Device::Kind::cuda) return "hidden_scales are for GPUs only";
  const Operand activation = effective_activation(spec.scheme, spec, options);
  if (std::string why = refuses_codes(scheme(spec.scheme), activation, in.hidden, in.hidden_token_scales);
      !why.empty())
    return "hidden: " + why;
  if (in.router_logits == nullptr && in.topk_ids == nullptr)
    return "hidden states with scales are not routed: give router_logits, or topk_ids and topk_weights";
  if (spec.ordered_inputs) return "the experts take their inputs in orders of their own: give numbers";
  if (spec.shared.intermediate == 0) return {};
  if (spec.shared.gated) return "the shared expert's gate is computed from numbers, not from hidden_scales";
  if (!(effective_activation(spec.shared.scheme, spec, options) == activation))
    return fmt::format("the shared expert's scheme {} does not take the activations of {}",
                       scheme(spec.shared.scheme).name, scheme(spec.scheme).name);
  return {};
}

Status check_call(const MoeSpec& spec, const PlanOptions& options, const ExpertWeights::State& weights,
                  const MoeInputs& in, const MoeOutputs& out) {
  const auto fail = [](std::string message) { return Status(Code::invalid_argument, std::move(message)); };
  if (!same(spec, weights.spec)) return fail("the weights were packed for another spec than the plan's");
  const std::int64_t tokens = in.hidden.rows;
  if (tokens < 0 || tokens > options.max_tokens)
    return fail(fmt::format("{} tokens, but the plan was made for 0..{}", tokens, options.max_tokens));
  if (in.hidden.cols != spec.hidden || out.hidden.cols != spec.hidden || out.hidden.rows != tokens)
    return fail(fmt::format("hidden states are [{}, {}] in and [{}, {}] out, expected [{}, {}]", tokens,
                            in.hidden.cols, out.hidden.rows, out.hidden.cols, tokens, spec.hidden));
  const bool codes = in.hidden_scales != nullptr;
  if (codes)
    if (const std::string why = refuses_codes(spec, options, weights.device, in); !why.empty())
      return fail(why);
  if ((!codes && !is_float(in.hidden.dtype)) || !is_float(out.hidden.dtype))
    return fail(fmt::format("hidden states are {} in and {} out, expected F32, F16 or BF16",
                            name(in.hidden.dtype), name(out.hidden.dtype)));
  if (tokens > 0 && (in.hidden.data == nullptr || out.hidden.data == nullptr))
    return fail("hidden is a null pointer");
  if ((in.topk_ids == nullptr) != (in.topk_weights == nullptr))
    return fail("topk_ids and topk_weights go together: one of them is missing");
  if (in.topk_ids != nullptr && in.router_logits != nullptr)
    return fail("both topk_ids and router_logits are given");
  if (in.topk_ids == nullptr && spec.ep_size > 1)
    return fail(
        fmt::format("the layer has one of {} parts of the experts, and cannot route to others: give "
                    "topk_ids and topk_weights",
                    spec.ep_size));
  if (in.topk_ids == nullptr && in.router_logits == nullptr && weights.vectors.router.empty())
    return fail("the weights hold no router: give router_logits, or topk_ids and topk_weights");
  if (in.topk_ids != nullptr && weights.device.kind == Device::Kind::cpu)
    return check_ids(spec, in.topk_ids, tokens);
  return {};
}

/// The same of ids in device memory, which it waits for.
Status check_device_ids(const MoeSpec& spec, const MoeInputs& in, cuda::Stream stream) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(in.hidden.rows * spec.top_k));
  Status status = cuda::copy(ids.data(), in.topk_ids, ids.size() * sizeof(ids[0]), stream);
  return status.ok() ? check_ids(spec, ids.data(), in.hidden.rows) : status;
}

/// Scales are what they would be if the matrix were packed for such a plan.
Status check_scales(const ExpertWeights::State& weights, const PackedMatrix& matrix, const MoeSpec& spec,
                    const PlanOptions& options) {
  if (weights.layout->scale_format == nullptr) return {};
  const Operand activation = effective_activation(matrix.scheme, spec, options);
  if (weights.layout->scale_format(matrix.scheme, matrix.scale_format, activation) == matrix.scale_format)
    return {};
  return {Code::invalid_argument,
          fmt::format("weights of {} are packed with scales in {}, not for the plan's activations in {}",
                      scheme(matrix.scheme).name, name(matrix.scale_format), name(activation.value))};
}

}  // namespace

Status MoePlan::run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
                    std::span<std::byte> workspace, cuda::Stream stream) const {
  const State& plan = *state_;
  const ExpertWeights::State& state = weights.state();
  if (Status status = check_call(plan.spec, plan.options, state, inputs, outputs); !status.ok())
    return status;
  if (state.layout != plan.kernel->layout)
    return {Code::invalid_argument,
            fmt::format("weights are packed as '{}', kernel {} reads '{}'", state.layout->name,
                        plan.kernel->name, plan.kernel->layout->name)};
  for (const PackedMatrix* matrix : {&state.routed[0].gate, &state.shared.gate})
    if (matrix->data != nullptr)
      if (Status status = check_scales(state, *matrix, plan.spec, plan.options); !status.ok()) return status;
  if (!(state.device == plan.device))
    return {Code::invalid_argument, "the weights are on another device than the plan's"};
  if (workspace.size() < plan.layout.bytes())
    return {Code::invalid_argument, fmt::format("the workspace has {} bytes, the plan needs {}",
                                                workspace.size(), plan.layout.bytes())};
  if (inputs.hidden.rows == 0) return {};

  std::byte* base = WorkspaceLayout::align(workspace.data());
  const MoeCall call{plan.spec, plan.options, plan.tuning[token_class(inputs.hidden.rows)],
                     state,     inputs,       outputs,
                     base,      stream,       plan.prepared.get()};
  const auto launch = [&] { return plan.ordered ? plan.ordered->run(call) : plan.kernel->launch(call); };
  if (!plan.options.debug_workspace) return launch();

  std::optional<cuda::DeviceGuard> guard;
  if (plan.device.kind == Device::Kind::cuda) guard.emplace(plan.device.index);
  if (inputs.topk_ids != nullptr && plan.device.kind == Device::Kind::cuda)
    if (Status status = check_device_ids(plan.spec, inputs, stream); !status.ok()) return status;
  return DebugWorkspace(plan.layout, base, plan.device, stream).run(plan.kernel->name, launch);
}

namespace {

std::string describe_tuning(const CpuTuning (&tuning)[kTokenClasses]) {
  constexpr const char* counts[kTokenClasses] = {"1-2 tokens", "3-16 tokens", "more tokens"};
  std::string text;
  for (int tokens = 0; tokens < kTokenClasses; ++tokens)
    text += fmt::format("{}: prefetch {}, split {}, up to {} prepared by one thread\n", counts[tokens],
                        tuning[tokens].prefetch < 0 ? "by CPU" : fmt::to_string(tuning[tokens].prefetch),
                        tuning[tokens].split, tuning[tokens].serial_tokens);
  if (const std::string& warning = TuningFile::installed().warning; !warning.empty()) text += warning + "\n";
  return text;
}

/// The candidates for some numbers of tokens, in thousands of clocks.
std::string describe_candidates(const KernelPlan& plan, int max_tokens) {
  std::string text;
  for (int tokens = 1; tokens <= max_tokens;
       tokens = tokens < max_tokens ? std::min(tokens * 8, max_tokens) : max_tokens + 1) {
    text += fmt::format("{} tokens, kclocks:", tokens);
    for (const CudaCandidate& candidate : plan.candidates(tokens))
      text += fmt::format(" {}{} {:.0f};", candidate.chosen ? "*" : "", gatefold::describe(candidate.tuning),
                          candidate.clocks / 1e3);
    text.back() = '\n';
  }
  return text;
}

}  // namespace

std::string MoePlan::describe() const {
  const State& plan = *state_;
  const MoeSpec& spec = plan.spec;
  const Scheme& row = scheme(spec.scheme);
  const Operand activation = effective_activation(spec.scheme, spec, plan.options);
  std::string text = fmt::format(
      "{}: {}{} experts, top {}, hidden {}, intermediate {}; weights {}; activations {}; up to {} tokens on "
      "{}\n",
      row.name, spec.ep_size > 1 ? fmt::format("1/{} of ", spec.ep_size) : "", spec.experts * spec.ep_size,
      spec.top_k, spec.hidden, spec.intermediate, gatefold::describe(row.weight, true),
      activation.value.stored() ? gatefold::describe(activation, false) : "f32", plan.options.max_tokens,
      plan.device.kind == Device::Kind::cpu ? fmt::format("{} threads", plan.options.threads)
                                            : fmt::format("GPU {}", plan.device.index));
  if (spec.shared.intermediate != 0)
    text += fmt::format("shared expert: intermediate {}, {}{}\n", spec.shared.intermediate,
                        scheme(spec.shared.scheme).name, spec.shared.gated ? ", gated" : "");
  text += fmt::format("kernel {}\n", plan.kernel->name);
  for (const std::string& why : plan.refused) text += fmt::format("  not {}\n", why);
  if (plan.device.kind == Device::Kind::cpu) text += describe_tuning(plan.tuning);
  if (plan.prepared != nullptr) text += describe_candidates(*plan.prepared, plan.options.max_tokens);
  text += fmt::format("workspace {} bytes\n", plan.layout.bytes());
  for (const auto& region : plan.layout.regions())
    text += fmt::format("  {:<20} {}\n", region.name, region.bytes);
  return text;
}

}  // namespace gatefold
