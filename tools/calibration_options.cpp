#include "tools/calibration_options.h"

#include <fmt/format.h>

#include "checkpoint/mapped_file.h"
#include "gatefold/decoder.h"
#include "tools/interrupt.h"

namespace gatefold::cli {

void add_calibration_options(CLI::App* command, CalibrationOptions& options) {
  options.command = command;
  command
      ->add_option_function<std::string>(
          "--method", [&options](const std::string& text) { options.method = find_method(text); },
          "rtn rounds to nearest; the others need --calibration")
      ->check(CLI::IsMember({"rtn", "gptq", "awq", "smoothquant"}))
      ->default_str("rtn");
  command
      ->add_option("--calibration", options.file,
                   "Text (byte-level models) or token ids (.npy, .safetensors)")
      ->type_name("FILE");
  command->add_option("--calibration-tokens", options.limit, "Only the first tokens; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--min-samples", options.calibrate.min_samples, "Tokens that every expert sees")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--all-experts", options.all_experts, "Every expert sees every token");
  command->add_option("--damping", options.calibrate.damping, "Of the Hessian, in parts of its mean diagonal")
      ->check(CLI::NonNegativeNumber)
      ->default_str("0.1; smoothquant: 0.01");
  command->add_option("--window", options.calibrate.window, "Tokens that attend to each other")
      ->check(CLI::Range(2, 65536))
      ->capture_default_str();
}

Status check_calibration_options(const CalibrationOptions& options, bool reads_text) {
  const auto& method = options.method;
  const bool has_file = !options.file.empty(), on_cpu = options.calibrate.device.kind == Device::Kind::cpu;
  const char* const any_method = "--method gptq, awq or smoothquant";
  const struct {
    const char* option;
    bool is_met;
    const char* need;
  } needs[] = {
      {"--method", !method || has_file, "--calibration FILE, unless it is rtn"},
      {"--calibration", method || reads_text, "--method gptq, awq or smoothquant, or a recipe with kv_cache"},
      {"--calibration-tokens", has_file, "--calibration FILE"},
      {"--window", has_file, "--calibration FILE"},
      {"--min-samples", method.has_value(), any_method},
      {"--all-experts", method.has_value(), any_method},
      {"--resume", method.has_value(), any_method},
      {"--backend", method || on_cpu, "--method gptq, awq or smoothquant: rtn runs on the CPU"},
      {"--damping", method && method != Method::awq, "--method gptq or smoothquant"},
      {"--activation-scale", method && method != Method::gptq, "--method awq or smoothquant"},
      {"--scale-search", !method, "--method rtn: the others search in their own way"},
      {"--allow-nonfinite", !method, "--method rtn"},
  };
  for (const auto& [option, is_met, need] : needs) {
    const CLI::Option* found = options.command->get_option_no_throw(option);
    if (!is_met && found != nullptr && found->count() > 0)
      return {Code::invalid_argument, fmt::format("{} needs {}", option, need)};
  }
  return {};
}

Result<std::vector<std::int32_t>> read_calibration(const CalibrationOptions& options,
                                                   const Checkpoint& source) {
  auto tokens = [&]() -> Result<std::vector<std::int32_t>> {
    if (options.file.ends_with(".npy") || options.file.ends_with(".safetensors"))
      return read_tokens(options.file, source.config().vocab);
    const Result<std::string> text = read_text(options.file, 1ull << 32);
    if (!text) return text.status();
    return text_tokens(source, *text);
  }();
  if (tokens && options.limit > 0 && tokens->size() > static_cast<std::size_t>(options.limit))
    tokens->resize(static_cast<std::size_t>(options.limit));
  return tokens;
}

CalibrateOptions calibrate_options_of(const CalibrationOptions& options, std::size_t tokens) {
  CalibrateOptions out = options.calibrate;
  if (options.all_experts) out.min_samples = static_cast<std::int64_t>(tokens);
  out.cancelled = DeferInterrupts::pending;
  return out;
}

}  // namespace gatefold::cli
