#include <fmt/format.h>

#include "checkpoint/convention.h"
#include "moe/host_calls.h"
#include "tools/cli.h"
#include "tools/tensors.h"

namespace gatefold::cli {
namespace {

struct Options {
  std::string directory, input, output;
  std::string backend = "cpu";
  LoadOptions load;
  PlanOptions plan;
  bool force = false, describe = false;
};

/// What the input file holds.
struct Input {
  std::int64_t tokens = 0;
  TensorView hidden;
  std::vector<std::int32_t> topk_ids;  ///< both empty, or both [tokens, top_k]
  std::vector<float> topk_weights;
};

Result<Input> read_input(const Source& source, const MoeSpec& spec) {
  const std::string file = source.files()[0].string();
  const TensorEntry* hidden = source.find("hidden");
  if (hidden == nullptr) return Status(Code::bad_file, file + ": no tensor 'hidden'");
  if (hidden->shape.size() != 2 || hidden->shape[1] != spec.hidden)
    return Status(Code::bad_file, fmt::format("{}: tensor 'hidden' is {}, not [tokens, {}]", file,
                                              format_shape(hidden->shape), spec.hidden));
  if (hidden->dtype != DType::f32 && hidden->dtype != DType::f16 && hidden->dtype != DType::bf16)
    return Status(Code::bad_file, fmt::format("{}: tensor 'hidden' is {}, none of F32, F16, BF16", file,
                                              name(hidden->dtype)));
  if (hidden->shape[0] > 1 << 24)
    return Status(Code::bad_file, fmt::format("{}: tensor 'hidden' has {} tokens, more than {}", file,
                                              hidden->shape[0], 1 << 24));
  Input input{hidden->shape[0], source.view(*hidden), {}, {}};

  const bool ids = source.find("topk_ids") != nullptr, weights = source.find("topk_weights") != nullptr;
  if (ids != weights)
    return Status(Code::bad_file, fmt::format("{}: has 'topk_{}' without 'topk_{}'", file,
                                              ids ? "ids" : "weights", ids ? "weights" : "ids"));
  if (!ids) return input;
  auto topk_ids = read_ids(source, "topk_ids", input.tokens, spec.top_k);
  if (!topk_ids) return topk_ids.status();
  auto topk_weights = read_floats(source, "topk_weights", input.tokens, spec.top_k);
  if (!topk_weights) return topk_weights.status();
  input.topk_ids = std::move(*topk_ids);
  input.topk_weights = std::move(*topk_weights);
  return input;
}

Status run(Options options, Json* json) {
  std::error_code ignored;
  if (!options.force && std::filesystem::exists(options.output, ignored))
    return {Code::invalid_argument, options.output + ": exists (--force replaces it)"};
  const auto checkpoint = Checkpoint::open(options.directory);
  if (!checkpoint) return checkpoint.status();
  const auto source = Source::open_file(options.input);
  if (!source) return source.status();
  const bool cuda = options.backend.starts_with("cuda");
  options.load.device = cuda ? Device::cuda() : Device::cpu();
  if (options.backend != "cpu" && options.backend != "cuda") options.plan.kernel = options.backend;
  options.load.plan = options.plan;
  const auto experts = load_experts(*checkpoint, options.load);
  if (!experts) return experts.status();
  for (const std::string& warning : experts->warnings()) fmt::print(stderr, "warning: {}\n", warning);
  const MoeSpec& spec = experts->spec();
  auto input = read_input(*source, spec);
  if (!input) return input.status();

  options.plan.max_tokens = static_cast<int>(std::max<std::int64_t>(input->tokens, 1));
  const auto plan = MoePlan::create(spec, options.plan, options.load.device);
  if (!plan) return plan.status();
  if (options.describe) fmt::print(stderr, "{}{}\n", plan->describe(), experts->describe());

  const auto tokens = static_cast<std::size_t>(input->tokens);
  std::vector<float> output(tokens * static_cast<std::size_t>(spec.hidden));
  std::vector<std::int32_t> ids(tokens * static_cast<std::size_t>(spec.top_k));
  std::vector<float> weights(ids.size());
  auto calls = HostCalls::create(*plan);
  if (!calls) return calls.status();
  Status done =
      calls->run(*plan, *experts,
                 {.hidden = {input->hidden.data, input->hidden.dtype, input->tokens, spec.hidden},
                  .topk_ids = input->topk_ids.empty() ? nullptr : input->topk_ids.data(),
                  .topk_weights = input->topk_weights.empty() ? nullptr : input->topk_weights.data()},
                 {.hidden = {output.data(), DType::f32, input->tokens, spec.hidden},
                  .topk_ids = ids.data(),
                  .topk_weights = weights.data()});
  if (!done.ok()) return done;

  const OutputTensor tensors[] = {
      {{"output", DType::f32, {input->tokens, spec.hidden}}, output.data()},
      {{"topk_ids", DType::i32, {input->tokens, spec.top_k}}, ids.data()},
      {{"topk_weights", DType::f32, {input->tokens, spec.top_k}}, weights.data()},
  };
  if (Status written = write_tensors(options.output, tensors, options.force); !written.ok()) return written;
  if (json != nullptr)
    *json = {{"output", options.output},
             {"layer", options.load.layer},
             {"scheme", scheme(spec.scheme).name},
             {"kernel", plan->kernel_name()},
             {"tokens", input->tokens}};
  else
    fmt::print("{}: {} tokens through layer {} in {}, kernel {}\n", options.output, input->tokens,
               options.load.layer, scheme(spec.scheme).name, plan->kernel_name());
  return {};
}

}  // namespace

void add_run(Cli& cli) {
  auto options = std::make_shared<Options>();
  CLI::App* command = cli.add("run", "Run one MoE layer on hidden states from a file",
                              [options](Json* json) { return run(*options, json); });
  add_directory(command, options->directory);
  command->add_option("--layer", options->load.layer, "Layer")->required()->check(CLI::NonNegativeNumber);
  command
      ->add_option("--input", options->input,
                   "safetensors file: hidden [T, H], optional topk_ids, topk_weights")
      ->required()
      ->type_name("FILE");
  command->add_option("--output", options->output, "safetensors file: output [T, H], topk_ids, topk_weights")
      ->required()
      ->type_name("FILE");
  add_scheme(command, options->load.scheme, "Scheme to quantize to on load; default: as stored");
  command->add_option("--backend", options->backend, "cpu, cuda, or a part of a kernel's name")
      ->capture_default_str();
  add_run_options(command, options->plan.precision, options->plan.weights_only);
  add_batch_invariant(command, options->plan.batch_invariant);
  add_fast_accumulation(command, options->plan.fast_accumulation);
  add_quantize_options(command, options->load.quantize);
  command->add_flag("--describe", options->describe, "Say on stderr which kernel runs, and why no other");
  command->add_flag("--force", options->force, "Replace the output file");
}

}  // namespace gatefold::cli
