// Checkpoints with one thing broken: every mutation must give an error that names the culprit, and never
// weights. They are tried on checkpoints made here and, where GATEFOLD_CHECKPOINTS names a folder of real
// ones, on those of the same name.
#include <gtest/gtest.h>

#include <cstdlib>

#include "convention_kinds.h"
#include "gatefold/moe.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

struct Mutation {
  const char* kind;
  const char* what;
  std::function<void(Files&)> apply;
  std::vector<std::string> culprits;  ///< what the message must name
};

nlohmann::json& group0(Files& files) {
  return files.quantization()["config_groups"]["group_0"];
}
nlohmann::json& weights(Files& files) {
  return group0(files)["weights"];
}

std::function<void(Files&)> drop(const std::string& suffix) {
  return [=](Files& files) { files.drop(suffix); };
}
std::function<void(Files&)> set(const std::string& key, const nlohmann::json& value) {
  return [=](Files& files) { files.quantization()[key] = value; };
}
std::function<void(Files&)> set_weights(const std::string& key, const nlohmann::json& value) {
  return [=](Files& files) { weights(files)[key] = value; };
}
std::function<void(Files&)> retype(const std::string& suffix, const std::string& dtype) {
  return [=](Files& files) { files.tensor(suffix).dtype = dtype; };
}
std::function<void(Files&)> transpose(const std::string& suffix) {
  return [=](Files& files) {
    auto& shape = files.tensor(suffix).shape;
    std::swap(shape[0], shape[1]);
  };
}
/// Bytes at the beginning of a tensor's data.
template <class T>
std::function<void(Files&)> write(const std::string& suffix, T value) {
  return [=](Files& files) { std::memcpy(files.tensor(suffix).data.data(), &value, sizeof value); };
}

/// GPTQModel says it twice.
void version2(Files& files) {
  files.quantization()["checkpoint_format"] = "gptq_v2";
  files.quantization().erase("format");
}

void add_bias(Files& files) {
  files.tensors.push_back(
      {"model.layers.0.mlp.experts.1.up_proj.bias", "F16", {128}, std::string(255, '\0') + '\1'});
}

const std::string gate0 = "experts.0.gate_proj", down1 = "experts.1.down_proj";
const std::string gate0_path = "model.layers.0.mlp.experts.0.gate_proj";

const std::vector<Mutation>& mutations() {
  static const std::vector<Mutation> all = {
      // compressed-tensors, packed integers
      {"ct-w4a16-g128-rtn", "no scale", drop(gate0 + ".weight_scale"), {gate0 + ".weight_scale"}},
      {"ct-w4a16-g128-rtn", "no codes", drop(down1 + ".weight_packed"), {down1, "weight_packed", "group_0"}},
      {"ct-w4a16-g128-rtn", "no shape", drop(gate0 + ".weight_shape"), {gate0 + ".weight_shape"}},
      {"ct-w4a16-g128-rtn",
       "another shape",
       write<std::int64_t>(gate0 + ".weight_shape", 64),
       {gate0 + ".weight_shape", "64"}},
      {"ct-w4a16-g128-rtn", "half the group", set_weights("group_size", 64), {"weight_scale", "group_0"}},
      {"ct-w4a16-g128-rtn", "twice the bits", set_weights("num_bits", 8), {"weight_packed", "group_0"}},
      {"ct-w4a16-g128-rtn", "three bits", set_weights("num_bits", 3), {"weight_packed", "group_0"}},
      {"ct-w4a16-g128-rtn", "zero points wanted", set_weights("symmetric", false), {"weight_zero_point"}},
      {"ct-w4a16-g128-rtn", "order wanted", set_weights("actorder", "group"), {"weight_g_idx"}},
      {"ct-w4a16-g128-rtn", "floats", set_weights("type", "float"), {"group_0"}},
      {"ct-w4a16-g128-rtn",
       "another format",
       [](Files& f) { group0(f)["format"] = "int-quantized"; },
       {"format", "int-quantized", "weight_packed"}},
      {"ct-w4a16-g128-rtn",
       "an unknown format",
       [](Files& f) { group0(f)["format"] = "marlin-24"; },
       {"group_0", "marlin-24"}},
      {"ct-w4a16-g128-rtn",
       "ignored",
       [](Files& f) { f.quantization()["ignore"].push_back(gate0_path); },
       {gate0, "ignore"}},
      {"ct-w4a16-g128-rtn",
       "no target",
       [](Files& f) { group0(f)["targets"] = {"re:.*nothing"}; },
       {"config_groups", "no target"}},
      {"ct-w4a16-g128-rtn",
       "codes transposed",
       transpose(gate0 + ".weight_packed"),
       {gate0 + ".weight_packed"}},
      {"ct-w4a16-g128-rtn",
       "scales as integers",
       retype(gate0 + ".weight_scale", "I16"),
       {gate0 + ".weight_scale", "I16"}},
      {"ct-w4a16-asym-g64",
       "no zero points",
       drop(gate0 + ".weight_zero_point"),
       {gate0 + ".weight_zero_point"}},
      {"ct-w4a16-asym-g64", "symmetric", set_weights("symmetric", true), {"weight_zero_point", "symmetric"}},
      {"ct-w4a16-asym-g64",
       "zero points transposed",
       transpose(gate0 + ".weight_zero_point"),
       {gate0 + ".weight_zero_point"}},
      {"ct-w4a16-g64-actorder", "no order", drop(gate0 + ".weight_g_idx"), {gate0 + ".weight_g_idx"}},
      {"ct-w4a16-g64-actorder",
       "order not said",
       set_weights("actorder", nullptr),
       {"weight_g_idx", "actorder"}},
      {"ct-w4a16-g64-actorder",
       "a group too many",
       write<std::int32_t>(gate0 + ".weight_g_idx", 4),
       {gate0 + ".weight_g_idx", "group 4"}},
      {"ct-w8a16-channel", "half the bits", set_weights("num_bits", 4), {"weight_packed", "group_0"}},
      {"ct-w8a16-channel",
       "groups",
       [](Files& f) { weights(f)["strategy"] = "group", weights(f)["group_size"] = 128; },
       {"weight_scale"}},
      // compressed-tensors, a byte each
      {"ct-int8-w8a8",
       "float8 codes",
       retype(gate0 + ".weight", "F8_E4M3"),
       {gate0 + ".weight", "F8_E4M3", "I8"}},
      {"ct-int8-w8a8", "no scale", drop(gate0 + ".weight_scale"), {gate0 + ".weight", "weight_scale"}},
      {"ct-fp8-dynamic",
       "float8 as integers",
       retype(gate0 + ".weight", "I8"),
       {gate0 + ".weight", "I8", "F8_E4M3"}},
      {"ct-fp8-dynamic", "integers said", set_weights("type", "int"), {"group_0"}},
      {"ct-fp8-dynamic", "one scale said", set_weights("strategy", "tensor"), {"group_0"}},
      {"ct-fp8-dynamic", "codes transposed", transpose(down1 + ".weight"), {down1 + ".weight"}},
      {"ct-fp8-tensor-static", "no input scale", drop(gate0 + ".input_scale"), {gate0 + ".input_scale"}},
      {"ct-fp8-tensor-static",
       "dynamic",
       [](Files& f) { group0(f)["input_activations"]["dynamic"] = true; },
       {"input_scale", "static"}},
      {"ct-fp8-tensor-static",
       "input scale of 0",
       write<std::uint16_t>(gate0 + ".input_scale", 0),
       {gate0 + ".input_scale", "positive"}},
      {"ct-fp8-block", "other blocks", set_weights("block_structure", {64, 64}), {"group_0", "64"}},
      {"ct-fp8-block", "scales transposed", transpose(gate0 + ".weight_scale"), {gate0 + ".weight_scale"}},
      // compressed-tensors, FP4 and MX
      {"ct-mxfp4a16",
       "scales as float8",
       retype(gate0 + ".weight_scale", "F8_E4M3"),
       {gate0 + ".weight_scale", "F8_E4M3"}},
      {"ct-mxfp4a16", "other scales said", set_weights("scale_dtype", "torch.float8_e4m3fn"), {"group_0"}},
      {"ct-mxfp4a16", "smaller groups", set_weights("group_size", 16), {"group_0"}},
      {"ct-mxfp8", "codes as bytes", retype(gate0 + ".weight", "U8"), {gate0 + ".weight", "U8"}},
      {"ct-mxfp8", "no scale", drop(gate0 + ".weight_scale"), {gate0 + ".weight", "weight_scale"}},
      {"ct-nvfp4", "no global scale", drop(gate0 + ".weight_global_scale"), {gate0 + ".weight_global_scale"}},
      {"ct-nvfp4", "no input scale", drop(down1 + ".input_global_scale"), {down1 + ".input_global_scale"}},
      {"ct-nvfp4",
       "a negative global scale",
       write<float>(gate0 + ".weight_global_scale", -4864.0f),
       {gate0 + ".weight_global_scale", "-4864"}},
      {"ct-nvfp4",
       "a negative block scale",
       write<std::uint8_t>(gate0 + ".weight_scale", 0xC0),
       {gate0 + ".weight_scale", "negative"}},
      {"ct-nvfp4",
       "global scale the other way round",
       write<float>(gate0 + ".weight_global_scale", 1.0f / 4864),
       {"warning", "gate_proj", "other way round"}},
      {"ct-nvfp4a16",
       "activations said",
       [](Files& f) {
         group0(f)["input_activations"] = weights(f), group0(f)["input_activations"]["dynamic"] = "local";
       },
       {"input_global_scale"}},
      // GPTQ
      {"gptq-sym-g128", "no zero points", drop(gate0 + ".qzeros"), {gate0 + ".qzeros"}},
      {"gptq-sym-g128", "no codes", drop(gate0 + ".qweight"), {gate0 + ".qweight"}},
      {"gptq-sym-g128", "half the group", set("group_size", 64), {"scales", "group_size 64"}},
      {"gptq-sym-g128", "twice the bits", set("bits", 8), {"qweight", "bits 8"}},
      {"gptq-sym-g128", "version 2", version2, {"qzeros", "checkpoint_format", "gptq_v2"}},
      {"gptq-sym-g128", "codes as floats", retype(gate0 + ".qweight", "F32"), {gate0 + ".qweight", "F32"}},
      {"gptq-sym-g128", "codes transposed", transpose(gate0 + ".qweight"), {gate0 + ".qweight"}},
      {"gptq-sym-g128",
       "another file says more bits",
       [](Files& f) {
         f.side["quantize_config.json"] = {{"bits", 8}};
       },
       {"quantize_config.json", "bits"}},
      {"gptq-sym-g128",
       "said to be AWQ",
       [](Files& f) {
         f.quantization() = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 128}};
       },
       {"awq"}},
      {"gptq-asym-g64", "symmetric", set("sym", true), {"qzeros", "sym"}},
      {"gptq-asym-g64", "version 2", version2, {"qzeros", "checkpoint_format"}},
      {"gptq-sym-g128", "a bias", add_bias, {"experts.1.up_proj.bias", "no biases"}},
      {"gptq-sym-g64-actorder", "no order", drop(gate0 + ".g_idx"), {gate0 + ".g_idx"}},
      {"gptq-sym-g64-actorder", "order not said", set("desc_act", false), {"g_idx", "desc_act"}},
      {"gptq-sym-g64-actorder",
       "a group too many",
       write<std::int32_t>(gate0 + ".g_idx", 4),
       {gate0 + ".g_idx", "group 4"}},
      {"gptq-x192-g128", "another group", set("group_size", 192), {"scales", "group_size 192"}},
      // AWQ
      {"awq-g64", "no zero points", drop(gate0 + ".qzeros"), {gate0 + ".qzeros"}},
      {"awq-g64", "twice the group", set("group_size", 128), {"scales", "group_size 128"}},
      {"awq-g64", "another layout", set("version", "gemv"), {"version", "gemv"}},
      {"awq-g64",
       "another file says another layout",
       [](Files& f) {
         f.side["quant_config.json"] = {{"version", "GEMV"}};
       },
       {"quant_config.json", "version", "gemm", "GEMV"}},
      {"awq-g64", "twice the bits", set("bits", 8), {"bits", "8"}},
      {"awq-g64",
       "said to be GPTQ",
       [](Files& f) {
         f.quantization() = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 64}, {"sym", false}};
       },
       {"qweight", "gptq"}},
      {"awq-g64", "left out", set("modules_to_not_convert", {gate0_path}), {gate0, "modules_to_not_convert"}},
      // fp8
      {"fp8-block128",
       "no scale",
       drop(gate0 + ".weight_scale_inv"),
       {gate0 + ".weight", "weight_scale_inv"}},
      {"fp8-block128",
       "no blocks said",
       set("weight_block_size", nullptr),
       {"weight_scale_inv", "weight_block_size"}},
      {"fp8-block128",
       "other blocks said",
       set("weight_block_size", {64, 128}),
       {"weight_scale_inv", "64, 128"}},
      {"fp8-block128", "float8 as integers", retype(gate0 + ".weight", "I8"), {gate0 + ".weight", "I8"}},
      {"fp8-block128",
       "scales transposed",
       transpose(gate0 + ".weight_scale_inv"),
       {gate0 + ".weight_scale_inv"}},
      {"fp8-block128",
       "left out",
       set("modules_to_not_convert", {gate0_path}),
       {gate0, "modules_to_not_convert"}},
      {"fp8-block128",
       "scale the other way round",
       [](Files& f) {
         std::string& data = f.tensor(gate0 + ".weight_scale_inv").data;
         for (std::size_t i = 0; i < data.size(); i += 4) {
           float scale = 0;
           std::memcpy(&scale, &data[i], 4);
           scale = 1 / scale;
           std::memcpy(&data[i], &scale, 4);
         }
       },
       {"warning", "gate_proj", "other way round"}},
      // ModelOpt
      {"modelopt-fp8", "no input scale", drop(gate0 + ".input_scale"), {gate0 + ".input_scale"}},
      {"modelopt-fp8", "no scale", drop(gate0 + ".weight_scale"), {gate0 + ".weight", "weight_scale"}},
      {"modelopt-fp8", "a bias", add_bias, {"experts.1.up_proj.bias", "no biases"}},
      {"modelopt-fp8",
       "said to be NVFP4",
       [](Files& f) { f.quantization()["quant_algo"] = "NVFP4", f.quantization().erase("config_groups"); },
       {"weight", "NVFP4"}},
      {"modelopt-nvfp4",
       "said to be FP8",
       [](Files& f) { f.quantization()["quant_algo"] = "FP8", f.quantization().erase("config_groups"); },
       {"FP8"}},
      {"modelopt-nvfp4", "no second scale", drop(gate0 + ".weight_scale_2"), {gate0 + ".weight_scale_2"}},
      {"modelopt-nvfp4", "other groups", set_weights("group_size", 32), {"group_size", "32", "NVFP4"}},
      {"modelopt-nvfp4", "more bits", set_weights("num_bits", 8), {"num_bits", "8", "NVFP4"}},
      {"modelopt-nvfp4", "an unknown algorithm", set("quant_algo", "NVFP5"), {"quant_algo", "NVFP5"}},
      {"modelopt-nvfp4",
       "left out",
       set("ignore", {"model.layers.0.mlp.experts.0*"}),
       {"experts.0.", "ignore"}},
      // gpt-oss
      {"gpt-oss-mxfp4", "no exponents", drop("gate_up_proj_scales"), {"gate_up_proj_scales"}},
      {"gpt-oss-mxfp4", "no codes", drop("down_proj_blocks"), {"down_proj_blocks"}},
      {"gpt-oss-mxfp4", "no biases", drop("gate_up_proj_bias"), {"gate_up_proj_bias"}},
      {"gpt-oss-mxfp4",
       "fewer biases",
       [](Files& f) {
         f.tensor("down_proj_bias").shape[1] /= 2,
             f.tensor("down_proj_bias").data.resize(f.tensor("down_proj_bias").data.size() / 2);
       },
       {"down_proj_bias"}},
      {"gpt-oss-mxfp4",
       "blocks transposed",
       [](Files& f) {
         std::swap(f.tensor("gate_up_proj_blocks").shape[1], f.tensor("gate_up_proj_blocks").shape[2]);
       },
       {"gate_up_proj_blocks"}},
      {"gpt-oss-mxfp4", "said to be fp8", set("quant_method", "fp8"), {"proj_blocks", "fp8"}},
      {"gpt-oss-mxfp4",
       "left out",
       set("modules_to_not_convert", {"model.layers.*.mlp.experts"}),
       {"modules_to_not_convert"}},
      {"deepseek-v4-fp4", "no exponents", drop("experts.0.w1.scale"), {"experts.0.w1.weight", "I8"}},
      {"deepseek-v4-fp4", "exponents as float8", retype("experts.0.w1.scale", "F8_E4M3"), {"experts.0.w1"}},
      {"kimi-nested-g32",
       "another group",
       [](Files& f) {
         f.config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] =
             64;
       },
       {"weight_scale", "group_0"}},
      // Groups that give as many scales
      {"gptq-sym-g64-actorder", "other groups, as many", set("group_size", 96), {"group"}},
      {"ct-w4a16-asym-g64", "other groups, as many", set_weights("group_size", 96), {"group_size 96"}},
      {"awq-g64", "other groups, as many", set("group_size", 70), {"group_size 70"}},
      // Real ones of which none is made here
      {"ct-w4a16-g128-gptq", "order said", set_weights("actorder", "group"), {"weight_g_idx"}},
      {"ct-w4a16-g128-gptq",
       "layer 1 without a scale",
       drop("layers.1.mlp.experts.2.up_proj.weight_scale"),
       {"layers.1.mlp.experts.2.up_proj"}},
      {"ct-x192-w4a16-g64", "groups of 128", set_weights("group_size", 128), {"group_0"}},
      {"ct-x192-fp8-block",
       "scales cut",
       [](Files& f) {
         FileTensor& scale = f.tensor(gate0 + ".weight_scale");
         scale.shape = {1, 2}, scale.data.resize(4);
       },
       {gate0 + ".weight_scale", "[1, 2]"}},
      {"mixtral-bf16", "no matrix", drop("experts.0.w1.weight"), {"experts.0.w1.weight"}},
      {"mixtral-bf16",
       "bf16 as integers",
       retype("experts.0.w2.weight", "I16"),
       {"experts.0.w2.weight", "I16"}},
      {"mixtral-bf16",
       "too many experts",
       [](Files& f) { f.config["num_local_experts"] = 3; },
       {"experts.3", "3 experts"}},
      {"qwen2-moe-bf16", "no shared gate", drop("shared_expert_gate.weight"), {"shared_expert_gate.weight"}},
      {"qwen2-moe-bf16",
       "a wider shared expert",
       [](Files& f) { f.config["shared_expert_intermediate_size"] = 128; },
       {"shared_expert.gate_proj.weight", "128"}},
      {"deepseek-v3-bf16",
       "no correction bias",
       drop("layers.1.mlp.gate.e_score_correction_bias"),
       {"correction bias"}},
      {"deepseek-v3-bf16",
       "router transposed",
       transpose("layers.1.mlp.gate.weight"),
       {"layers.1.mlp.gate.weight"}},
  };
  return all;
}

/// What opening, reading and loading a directory say: the first error, or else a warning, or nothing.
std::string complaint(const fs::path& directory) {
  const auto checkpoint = Checkpoint::open(directory);
  if (!checkpoint) return checkpoint.status().message();
  const MoeSpec& moe = checkpoint->config().moe;
  for (const ExpertGroup& group : checkpoint->expert_groups())
    for (int expert = 0; expert < moe.experts; ++expert)
      for (const Projection projection : {Projection::gate, Projection::up, Projection::down})
        if (const auto matrix = checkpoint->expert(group.layer, expert, projection); !matrix)
          return matrix.status().message();
  for (const ExpertGroup& group : checkpoint->expert_groups()) {
    const auto experts = load_experts(*checkpoint, {.layer = group.layer});
    if (!experts) return experts.status().message();
    if (!experts->warnings().empty()) return "warning: " + experts->warnings().front();
  }
  return {};
}

void expect_complaint(Files files, const Mutation& mutation) {
  const TemporaryDirectory good, bad;
  files.write(good.path());
  EXPECT_EQ(complaint(good.path()), "");
  mutation.apply(files);
  files.write(bad.path());
  const std::string message = complaint(bad.path());
  EXPECT_NE(message, "") << "no error";
  for (const std::string& culprit : mutation.culprits)
    EXPECT_NE(message.find(culprit), std::string::npos) << "no '" << culprit << "' in: " << message;
}

bool is_made_here(const char* kind) {
  return std::any_of(all_kinds().begin(), all_kinds().end(),
                     [&](const CheckpointKind& known) { return std::string_view(kind) == known.name; });
}

TEST(Mutations, OfCheckpointsMadeHere) {
  int tried = 0;
  for (const Mutation& mutation : mutations()) {
    if (!is_made_here(mutation.kind)) continue;
    SCOPED_TRACE(std::string(mutation.kind) + ": " + mutation.what);
    expect_complaint(make_checkpoint(mutation.kind), mutation);
    ++tried;
  }
  EXPECT_GE(tried, 90);
}

class RealMutations : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("GATEFOLD_CHECKPOINTS") == nullptr)
      GTEST_SKIP() << "GATEFOLD_CHECKPOINTS names no folder of checkpoints";
  }
  /// Without the files beside config.json: these would show some mutations before the tensors do.
  static Files load(const fs::path& directory) {
    const auto checkpoint = Checkpoint::open(directory);
    if (!checkpoint) throw std::runtime_error(checkpoint.status().message());
    Files files;
    files.config = nlohmann::json::parse(load_file(directory / "config.json"));
    files.tensors = load_tensors(*checkpoint);
    return files;
  }
};

TEST_F(RealMutations, OfCheckpointsOfOtherSoftware) {
  int tried = 0;
  for (const Mutation& mutation : mutations()) {
    const fs::path directory = fs::path(std::getenv("GATEFOLD_CHECKPOINTS")) / mutation.kind;
    if (!fs::exists(directory / "config.json")) continue;
    SCOPED_TRACE(std::string(mutation.kind) + ": " + mutation.what);
    expect_complaint(load(directory), mutation);
    ++tried;
  }
  EXPECT_GE(tried, 90);
}

}  // namespace
}  // namespace gatefold
