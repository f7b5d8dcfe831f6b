#pragma once
/// \file
/// Checkpoints of every convention, named like those that the original tools wrote (real_checkpoint_test).

#include "convention_files.h"

namespace gatefold {

namespace kinds {

using Json = nlohmann::json;
using Writer = ConventionWriter;

inline Json args(int bits, const char* type, const char* strategy) {
  return {
      {"num_bits", bits}, {"type", type}, {"strategy", strategy}, {"symmetric", true}, {"dynamic", false}};
}

inline void compressed_tensors(Writer& writer, const char* format, const Json& weights, const Json& input) {
  writer.files.quantization() = {{"quant_method", "compressed-tensors"},
                                 {"format", format},
                                 {"version", "0.19.0"},
                                 {"ignore", {"lm_head"}},
                                 {"config_groups",
                                  {{"group_0",
                                    {{"targets", {"Linear"}},
                                     {"weights", weights},
                                     {"input_activations", input},
                                     {"format", format}}}}}};
}

inline Files ct_packed(int bits, bool symmetric, std::int64_t group, bool ordered) {
  Writer writer;
  Json weights = args(bits, "int", group == 0 ? "channel" : "group");
  if (group != 0) weights["group_size"] = group;
  weights["symmetric"] = symmetric;
  if (ordered) weights["actorder"] = "group";
  compressed_tensors(writer, "pack-quantized", weights, nullptr);
  writer.for_each_matrix([&](const std::string& key, const std::string& module, std::int64_t n,
                             std::int64_t k) {
    const auto m = writer.integers<formats::bf16>(n, k, bits, symmetric, group, ordered);
    const std::int64_t row = (k * bits + 31) / 32;
    writer.add(module + ".weight_packed", "I32", {n, row},
               bytes_of_values(pack_words(bits, n, k, 1, row, [&](auto r, auto i) { return m.code(r, i); })));
    writer.add(module + ".weight_scale", "BF16", {n, m.groups}, bytes_of_values(m.scales));
    writer.add(module + ".weight_shape", "I64", {2}, bytes_of_values(std::vector<std::int64_t>{n, k}));
    if (!symmetric)
      writer.add(module + ".weight_zero_point", "I32", {(n * bits + 31) / 32, m.groups},
                 bytes_of_values(pack_words(bits, m.groups, n, m.groups, 1,
                                            [&](auto g, auto r) { return m.zero(r, g); })));
    if (ordered) writer.add(module + ".weight_g_idx", "I32", {k}, bytes_of_values(m.group_of));
    writer.files.weights[key] = Writer::values(m);
  });
  writer.add_router("gate");
  return writer.files;
}

/// int8 channel with int8 tokens, one code in a byte.
inline Files ct_int8() {
  Writer writer;
  Json input = args(8, "int", "token");
  input["dynamic"] = true;
  compressed_tensors(writer, "int-quantized", args(8, "int", "channel"), input);
  writer.for_each_matrix(
      [&](const std::string& key, const std::string& module, std::int64_t n, std::int64_t k) {
        const auto m = writer.integers<formats::bf16>(n, k, 8, true, 0, false);
        std::string codes;
        for (const std::uint32_t code : m.codes) codes += static_cast<char>(static_cast<int>(code) - 128);
        writer.add(module + ".weight", "I8", {n, k}, codes);
        writer.add(module + ".weight_scale", "BF16", {n, 1}, bytes_of_values(m.scales));
        writer.files.weights[key] = Writer::values(m);
      });
  writer.add_router("gate");
  return writer.files;
}

/// e4m3 with wide scales of blocks [block_n, block_k] (0: the whole extent), in any convention.
struct Fp8 {
  std::int64_t block_n = 0, block_k = 0;
  const char* scale_suffix = ".weight_scale";
  std::vector<std::int64_t> single_shape = {1};
  bool static_input = false;
};

template <Format Scale>
void add_fp8(Writer& writer, const Fp8& fp8) {
  writer.for_each_matrix([&](const std::string& key, const std::string& module, std::int64_t n,
                             std::int64_t k) {
    const std::int64_t bn = fp8.block_n == 0 ? n : fp8.block_n, bk = fp8.block_k == 0 ? k : fp8.block_k;
    const std::int64_t rows = (n + bn - 1) / bn, cols = (k + bk - 1) / bk;
    std::vector<float> scales;
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      const float scale = 0.001f + 0.0003f * static_cast<float>(writer.random(40));
      scales.push_back(decode<Scale>(encode<Scale>(scale)));
    }
    const std::string codes = writer.random_e4m3(n * k);
    std::vector<float>& weights = writer.files.weights[key];
    for (std::int64_t i = 0; i < n * k; ++i)
      weights.push_back(decode<formats::e4m3>(static_cast<std::uint8_t>(codes[static_cast<std::size_t>(i)])) *
                        scales[static_cast<std::size_t>(i / k / bn * cols + i % k / bk)]);
    writer.add(module + ".weight", "F8_E4M3", {n, k}, codes);
    const bool single = fp8.block_n == 0 && fp8.block_k == 0;
    writer.add_wide<Scale>(module + fp8.scale_suffix,
                           single ? fp8.single_shape : std::vector<std::int64_t>{rows, cols}, scales);
    if (fp8.static_input) writer.add_wide<Scale>(module + ".input_scale", fp8.single_shape, {0.0625f});
  });
  writer.add_router("gate");
}

inline Files ct_fp8(const char* strategy, const Fp8& fp8) {
  Writer writer;
  Json weights = args(8, "float", strategy), input = args(8, "float", fp8.static_input ? "tensor" : "token");
  if (fp8.block_k != 0) {
    weights["block_structure"] = {fp8.block_n, fp8.block_k};
    input["strategy"] = "group", input["group_size"] = fp8.block_k;
  }
  input["dynamic"] = !fp8.static_input;
  compressed_tensors(writer, "float-quantized", weights, input);
  add_fp8<formats::bf16>(writer, fp8);
  return writer.files;
}

/// MX: codes and exponents.
inline Files ct_mx(bool fp4) {
  Writer writer;
  Json weights = args(fp4 ? 4 : 8, "float", "group"), input = nullptr;
  weights["group_size"] = 32, weights["scale_dtype"] = "torch.uint8";
  if (!fp4) input = weights, input["dynamic"] = true;
  compressed_tensors(writer, fp4 ? "mxfp4-pack-quantized" : "mxfp8-quantized", weights, input);
  writer.for_each_matrix([&](const std::string& key, const std::string& module, std::int64_t n,
                             std::int64_t k) {
    const std::string codes = fp4 ? writer.random_bytes(n * k / 2, 0, 256) : writer.random_e4m3(n * k);
    const std::string scales = writer.random_bytes(n * k / 32, 112, 10);
    std::vector<float>& weights_of = writer.files.weights[key];
    for (std::int64_t i = 0; i < n * k; ++i) {
      const auto byte = static_cast<std::uint8_t>(codes[static_cast<std::size_t>(fp4 ? i / 2 : i)]);
      const float value = fp4 ? decode<formats::e2m1>(byte >> (i % 2 * 4) & 15) : decode<formats::e4m3>(byte);
      weights_of.push_back(
          std::ldexp(value, static_cast<std::uint8_t>(scales[static_cast<std::size_t>(i / 32)]) - 127));
    }
    writer.add(module + (fp4 ? ".weight_packed" : ".weight"), fp4 ? "U8" : "F8_E4M3", {n, fp4 ? k / 2 : k},
               codes);
    writer.add(module + ".weight_scale", "U8", {n, k / 32}, scales);
  });
  writer.add_router("gate");
  return writer.files;
}

/// NVFP4: `divides` as in compressed-tensors, else as in ModelOpt.
inline Files nvfp4(bool divides, bool static_input) {
  Writer writer;
  if (divides) {
    Json weights = args(4, "float", "tensor_group");
    weights["group_size"] = 16, weights["scale_dtype"] = "torch.float8_e4m3fn";
    Json input = weights;
    input["dynamic"] = "local";
    compressed_tensors(writer, "nvfp4-pack-quantized", weights, static_input ? input : Json(nullptr));
  } else {
    const Json four{{"num_bits", 4}, {"type", "float"}, {"group_size", 16}, {"dynamic", false}};
    writer.files.quantization() = {
        {"quant_method", "modelopt"},
        {"quant_algo", "NVFP4"},
        {"ignore", {"lm_head"}},
        {"config_groups",
         {{"group_0", {{"weights", four}, {"input_activations", four}, {"targets", {"Linear"}}}}}}};
  }
  writer.for_each_matrix(
      [&](const std::string& key, const std::string& module, std::int64_t n, std::int64_t k) {
        const std::string codes = writer.random_bytes(n * k / 2, 0, 256),
                          scales = writer.random_bytes(n * k / 16, 0x40, 60);
        const float global = divides ? 4864.0f : 1.0f / 4864.0f;
        std::vector<float>& weights = writer.files.weights[key];
        for (std::int64_t i = 0; i < n * k; ++i) {
          const auto byte = static_cast<std::uint8_t>(codes[static_cast<std::size_t>(i / 2)]);
          const float block =
              decode<formats::e4m3>(static_cast<std::uint8_t>(scales[static_cast<std::size_t>(i / 16)]));
          weights.push_back(decode<formats::e2m1>(byte >> (i % 2 * 4) & 15) *
                            (divides ? block / global : block * global));
        }
        const std::vector<std::int64_t> one =
            divides ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{};
        writer.add(module + (divides ? ".weight_packed" : ".weight"), "U8", {n, k / 2}, codes);
        writer.add(module + ".weight_scale", "F8_E4M3", {n, k / 16}, scales);
        writer.add_wide<formats::f32>(module + (divides ? ".weight_global_scale" : ".weight_scale_2"), one,
                                      {global});
        if (static_input)
          writer.add_wide<formats::f32>(module + (divides ? ".input_global_scale" : ".input_scale"), one,
                                        {divides ? 1024.0f : 0.001f});
      });
  writer.add_router("gate");
  return writer.files;
}

struct Gptq {
  int bits = 4;
  bool symmetric = true;
  std::int64_t group = 128;
  bool ordered = false;
  int version = 1, intermediate = 128;
};

inline Files gptq(const Gptq& options) {
  Writer writer(256, options.intermediate);
  writer.files.quantization() = {{"quant_method", "gptq"},
                                 {"bits", options.bits},
                                 {"group_size", options.group == 0 ? -1 : options.group},
                                 {"sym", options.symmetric},
                                 {"desc_act", options.ordered},
                                 {"checkpoint_format", options.version == 2 ? "gptq_v2" : "gptq"}};
  const std::uint32_t mask = (1u << options.bits) - 1;
  writer.for_each_matrix([&](const std::string& key, const std::string& module, std::int64_t n,
                             std::int64_t k) {
    const auto m =
        writer.integers<formats::f16>(n, k, options.bits, options.symmetric, options.group, options.ordered);
    std::vector<std::uint16_t> scales;
    for (std::int64_t g = 0; g < m.groups; ++g)
      for (std::int64_t r = 0; r < n; ++r) scales.push_back(m.scale(r, g));
    const std::int64_t zero_row = n * options.bits / 32;
    writer.add(
        module + ".qweight", "I32", {k * options.bits / 32, n},
        bytes_of_values(pack_words(options.bits, n, k, n, 1, [&](auto r, auto i) { return m.code(r, i); })));
    writer.add(module + ".qzeros", "I32", {m.groups, zero_row},
               bytes_of_values(pack_words(options.bits, m.groups, n, 1, zero_row, [&](auto g, auto r) {
                 return (m.zero(r, g) - (options.version == 1 ? 1 : 0)) & mask;
               })));
    writer.add(module + ".scales", "F16", {m.groups, n}, bytes_of_values(scales));
    writer.add(module + ".g_idx", "I32", {k}, bytes_of_values(m.group_of));
    writer.files.weights[key] = Writer::values(m);
  });
  writer.add_router("gate");
  return writer.files;
}

inline Files awq() {
  Writer writer;
  writer.files.quantization() = {
      {"quant_method", "awq"}, {"bits", 4}, {"group_size", 64}, {"zero_point", true}, {"version", "gemm"}};
  // The columns of a word, from its lowest nibble on.
  constexpr int order[] = {0, 2, 4, 6, 1, 3, 5, 7};
  writer.for_each_matrix([&](const std::string& key, const std::string& module, std::int64_t n,
                             std::int64_t k) {
    const auto m = writer.integers<formats::f16>(n, k, 4, false, 64, false);
    std::vector<std::uint16_t> scales;
    for (std::int64_t g = 0; g < m.groups; ++g)
      for (std::int64_t r = 0; r < n; ++r) scales.push_back(m.scale(r, g));
    writer.add(module + ".qweight", "I32", {k, n / 8},
               bytes_of_values(pack_words(
                   4, k, n, 1, n / 8, [&](auto i, auto r) { return m.code(r / 8 * 8 + order[r % 8], i); })));
    writer.add(module + ".qzeros", "I32", {m.groups, n / 8},
               bytes_of_values(pack_words(4, m.groups, n, 1, n / 8, [&](auto g, auto r) {
                 return m.zero(r / 8 * 8 + order[r % 8], g);
               })));
    writer.add(module + ".scales", "F16", {m.groups, n}, bytes_of_values(scales));
    writer.files.weights[key] = Writer::values(m);
  });
  writer.add_router("gate");
  return writer.files;
}

inline Files fp8(bool block) {
  Writer writer;
  writer.files.quantization() = {
      {"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", block ? "dynamic" : "static"}};
  if (block) writer.files.quantization()["weight_block_size"] = {128, 128};
  add_fp8<formats::f32>(
      writer, block ? Fp8{128, 128, ".weight_scale_inv"} : Fp8{.single_shape = {}, .static_input = true});
  return writer.files;
}

inline Files modelopt_fp8() {
  Writer writer;
  const Json eight{{"num_bits", 8}, {"type", "float"}, {"dynamic", false}};
  writer.files.quantization() = {
      {"quant_method", "modelopt"},
      {"quant_algo", "FP8"},
      {"ignore", {"lm_head", "model.layers.*.mlp.gate"}},
      {"config_groups",
       {{"group_0", {{"weights", eight}, {"input_activations", eight}, {"targets", {"Linear"}}}}}}};
  add_fp8<formats::f32>(writer, {.single_shape = {}, .static_input = true});
  return writer.files;
}

/// All experts in a tensor, rows of gate and up in turns, biases.
inline Files gpt_oss() {
  Writer writer(128, 96);
  writer.files.config["model_type"] = "gpt_oss";
  writer.files.config["num_local_experts"] = Writer::kExperts;
  writer.files.config["swiglu_limit"] = 7.0;
  writer.files.quantization() = {{"quant_method", "mxfp4"},
                                 {"modules_to_not_convert", {"model.layers.*.self_attn"}}};
  for (const std::string name : {"gate_up_proj", "down_proj"}) {
    const bool down = name == "down_proj";
    const std::int64_t rows = down ? 128 : 192, k = down ? 96 : 128, experts = Writer::kExperts;
    const std::string codes = writer.random_bytes(experts * rows * k / 2, 0, 256);
    const std::string scales = writer.random_bytes(experts * rows * k / 32, 116, 6);
    std::vector<float> biases;
    for (std::int64_t i = 0; i < experts * rows; ++i)
      biases.push_back(0.125f * static_cast<float>(writer.random(9)) - 0.5f);
    for (std::int64_t i = 0; i < experts * rows * k; ++i) {
      const std::int64_t e = i / (rows * k), row = i / k % rows;
      const std::string key = std::to_string(e) + (down ? ".down" : row % 2 == 0 ? ".gate" : ".up");
      const auto byte = static_cast<std::uint8_t>(codes[static_cast<std::size_t>(i / 2)]);
      writer.files.weights[key].push_back(
          std::ldexp(decode<formats::e2m1>(byte >> (i % 2 * 4) & 15),
                     static_cast<std::uint8_t>(scales[static_cast<std::size_t>(i / 32)]) - 127));
      if (i % k == 0) writer.files.biases[key].push_back(biases[static_cast<std::size_t>(e * rows + row)]);
    }
    const std::string module = "model.layers.0.mlp.experts." + name;
    writer.add(module + "_blocks", "U8", {experts, rows, k / 32, 16}, codes);
    writer.add(module + "_scales", "U8", {experts, rows, k / 32}, scales);
    writer.add_wide<formats::bf16>(module + "_bias", {experts, rows}, biases);
  }
  writer.add_router("router");
  writer.add_wide<formats::bf16>("model.layers.0.mlp.router.bias", {Writer::kExperts}, {0.5f, -0.25f});
  return writer.files;
}

/// DeepSeek-V4: experts of e2m1 in I8 under other names, in the convention fp8.
inline Files deepseek_v4() {
  Writer writer;
  writer.prefix = "", writer.block = "ffn";
  writer.files.config["model_type"] = "deepseek_v4";
  writer.files.config.erase("intermediate_size");
  writer.files.config["n_routed_experts"] = Writer::kExperts;
  writer.files.config["scoring_func"] = "sqrtsoftplus";
  writer.files.config["expert_dtype"] = "fp4";
  writer.files.quantization() = {{"quant_method", "fp8"},
                                 {"fmt", "e4m3"},
                                 {"activation_scheme", "dynamic"},
                                 {"scale_fmt", "ue8m0"},
                                 {"weight_block_size", {128, 128}}};
  writer.for_each_matrix(
      [&](const std::string& key, const std::string& module, std::int64_t n, std::int64_t k) {
        const std::string codes = writer.random_bytes(n * k / 2, 0, 256),
                          scales = writer.random_bytes(n * k / 32, 112, 10);
        for (std::int64_t i = 0; i < n * k; ++i)
          writer.files.weights[key].push_back(std::ldexp(
              decode<formats::e2m1>(
                  static_cast<std::uint8_t>(codes[static_cast<std::size_t>(i / 2)]) >> (i % 2 * 4) & 15),
              static_cast<std::uint8_t>(scales[static_cast<std::size_t>(i / 32)]) - 127));
        writer.add(module + ".weight", "I8", {n, k / 2}, codes);
        writer.add(module + ".scale", "F8_E8M0", {n, k / 32}, scales);
      });
  writer.add_router("gate");
  writer.add_wide<formats::f32>("layers.0.ffn.gate.bias", {Writer::kExperts}, {0.25f, -0.25f});
  return writer.files;
}

/// A language model within another one (Kimi-K2.5): config and names are nested.
inline Files nested() {
  Files files = ct_packed(4, true, 32, false);
  nlohmann::json inner = files.config;
  inner["model_type"] = "qwen3_moe";
  files.config = {{"model_type", "kimi_k25"}, {"text_config", inner}};
  for (FileTensor& tensor : files.tensors) tensor.name = "language_model." + tensor.name;
  return files;
}

}  // namespace kinds

struct CheckpointKind {
  const char* name;
  const char* scheme;  ///< in which its experts are stored
  std::function<Files()> make;
};

inline const std::vector<CheckpointKind>& all_kinds() {
  using namespace kinds;
  static const std::vector<CheckpointKind> all = {
      {"ct-w4a16-g128-rtn", "int4_g128", [] { return ct_packed(4, true, 128, false); }},
      {"ct-w4a16-asym-g64", "uint4_g64", [] { return ct_packed(4, false, 64, false); }},
      {"ct-w4a16-g64-actorder", "int4_g64", [] { return ct_packed(4, true, 64, true); }},
      {"ct-w3a16-g64", "int4_g64", [] { return ct_packed(3, true, 64, false); }},
      {"ct-w3a16-asym-channel", "uint4_g128", [] { return ct_packed(3, false, 0, false); }},
      {"ct-w8a16-channel", "int8", [] { return ct_packed(8, true, 0, false); }},
      {"ct-w8a16-g128", "int8_g128", [] { return ct_packed(8, true, 128, false); }},
      {"ct-w8a16-g64", "int8_g32", [] { return ct_packed(8, true, 64, false); }},
      {"ct-int8-w8a8", "int8_aint8", ct_int8},
      {"ct-fp8-dynamic", "fp8_channel_afp8", [] { return ct_fp8("channel", {.block_n = 1}); }},
      {"ct-fp8-tensor-static", "fp8_tensor_afp8", [] { return ct_fp8("tensor", {.static_input = true}); }},
      {"ct-fp8-block", "fp8_block_afp8", [] { return ct_fp8("block", {.block_n = 128, .block_k = 128}); }},
      {"ct-mxfp4a16", "mxfp4", [] { return ct_mx(true); }},
      {"ct-mxfp8", "mxfp8_amxfp8", [] { return ct_mx(false); }},
      {"ct-nvfp4", "nvfp4_anvfp4", [] { return nvfp4(true, true); }},
      {"ct-nvfp4a16", "nvfp4", [] { return nvfp4(true, false); }},
      {"gptq-sym-g128", "int4_g128", [] { return gptq({}); }},
      {"gptq-asym-g64", "uint4_g64", [] { return gptq({.symmetric = false, .group = 64}); }},
      {"gptq-sym-g64-actorder", "int4_g64", [] { return gptq({.group = 64, .ordered = true}); }},
      {"gptq-x192-g128", "int4_g64", [] { return gptq({.intermediate = 192}); }},
      {"gptq-v2-asym", "uint4_g128", [] { return gptq({.symmetric = false, .version = 2}); }},
      {"gptq-3bit", "int4_g64", [] { return gptq({.bits = 3, .group = 64}); }},
      {"gptq-2bit-asym", "uint4_g32", [] { return gptq({.bits = 2, .symmetric = false, .group = 32}); }},
      {"gptq-8bit-channel", "int8", [] { return gptq({.bits = 8, .group = 0}); }},
      {"awq-g64", "uint4_g64", awq},
      {"fp8-block128", "fp8_block_afp8", [] { return fp8(true); }},
      {"fp8-tensor-static", "fp8_tensor_afp8", [] { return fp8(false); }},
      {"modelopt-fp8", "fp8_tensor_afp8", modelopt_fp8},
      {"modelopt-nvfp4", "nvfp4_anvfp4", [] { return nvfp4(false, true); }},
      {"gpt-oss-mxfp4", "mxfp4", gpt_oss},
      {"deepseek-v4-fp4", "mxfp4", deepseek_v4},
      {"kimi-nested-g32", "int4_g32", nested},
  };
  return all;
}

inline Files make_checkpoint(const std::string& kind) {
  for (const CheckpointKind& known : all_kinds())
    if (kind == known.name) return known.make();
  throw std::runtime_error("no kind " + kind);
}

}  // namespace gatefold
