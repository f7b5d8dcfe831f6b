// Seconds that GPTQ (or AWQ, SmoothQuant) of one MoE layer takes, whole: routing, Hessians, all experts, and
// the layer's output.
//   gptq_benchmark [--backend cpu|cuda] [--scheme int4_g128] [--method gptq] [--tokens 65536] [--experts 128]
//                  [--hidden 2048] [--intermediate 768] [--top-k 8] [--threads 0] [--runs 1] [--directory
//                  DIR]
// The layer is random, of the shape of Qwen3-30B-A3B's unless told otherwise, and is written to DIR
// (a temporary one) as a checkpoint of bf16 first, about 1.2 GB.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gatefold/checkpoint.h"
#include "gatefold/codec.h"
#include "model/calibrate_layer.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string backend = "cpu", scheme = "int4_g128", method = "gptq";
  fs::path directory = fs::temp_directory_path() / "gptq_benchmark";
  std::int64_t tokens = 65536, experts = 128, hidden = 2048, intermediate = 768, top_k = 8;
  int threads = 0, runs = 1;
};

/// One layer of Qwen3-MoE, without what calibration of its experts does not read.
void write_checkpoint(const Options& o) {
  fs::create_directories(o.directory);
  std::ofstream(o.directory / "config.json") << fmt::format(
      R"({{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": {},
 "moe_intermediate_size": {}, "intermediate_size": {}, "num_experts": {}, "num_experts_per_tok": {},
 "norm_topk_prob": true, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 4,
 "head_dim": 128, "vocab_size": 256, "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
 "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16"}})",
      o.hidden, o.intermediate, o.intermediate, o.experts, o.top_k);

  std::vector<std::string> tensors;
  std::int64_t at = 0;
  const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
    const std::int64_t end = at + rows * cols * 2;
    tensors.push_back(fmt::format(
        R"("model.layers.0.mlp.{}.weight": {{"dtype": "BF16", "shape": [{}, {}], "data_offsets": [{}, {}]}})",
        name, rows, cols, at, end));
    at = end;
  };
  add("gate", o.experts, o.hidden);
  for (std::int64_t e = 0; e < o.experts; ++e) {
    add(fmt::format("experts.{}.gate_proj", e), o.intermediate, o.hidden);
    add(fmt::format("experts.{}.up_proj", e), o.intermediate, o.hidden);
    add(fmt::format("experts.{}.down_proj", e), o.hidden, o.intermediate);
  }
  const std::string header = fmt::format("{{{}}}", fmt::join(tensors, ", "));
  const auto size = static_cast<std::uint64_t>(header.size());
  std::ofstream file(o.directory / "model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.03f);
  std::vector<std::uint16_t> pool(16777213);  // repeated, at no period of a matrix
  for (auto& w : pool) w = static_cast<std::uint16_t>(encode<formats::bf16>(normal(random)));
  for (std::int64_t left = at; left > 0; left -= static_cast<std::int64_t>(pool.size()) * 2)
    file.write(reinterpret_cast<const char*>(pool.data()),
               std::min(left, static_cast<std::int64_t>(pool.size()) * 2));
}

/// Hidden states with channels of different size.
std::vector<float> hidden_states(const Options& o) {
  std::vector<float> x(static_cast<std::size_t>(o.tokens * o.hidden));
#pragma omp parallel for
  for (std::int64_t t = 0; t < o.tokens; ++t) {
    std::mt19937 random(static_cast<unsigned>(t));
    std::normal_distribution<float> normal;
    for (std::int64_t j = 0; j < o.hidden; ++j)
      x[t * o.hidden + j] = normal(random) * (j % 31 == 0 ? 4.0f : 1.0f);
  }
  return x;
}

int fail(const std::string& message) {
  fmt::print(stderr, "{}\n", message);
  return 1;
}

int run(const Options& o) {
  const auto id = find_scheme(o.scheme);
  if (!id) return fail(fmt::format("no scheme {}", o.scheme));
  write_checkpoint(o);
  const auto checkpoint = Checkpoint::open(o.directory.string());
  if (!checkpoint) return fail(checkpoint.status().message());
  LayerOptions options;
  options.scheme = *id;
  const auto method = find_method(o.method);
  if (!method) return fail(fmt::format("no method {}", o.method));
  options.method = *method;
  options.device = o.backend == "cuda" ? Device::cuda() : Device::cpu();
  options.threads = o.threads == 0 ? omp_get_max_threads() : o.threads;
  const std::vector<float> normed = hidden_states(o);
  for (int run = 0; run < o.runs; ++run) {
    Stream stream{std::vector<float>(normed.size()), normed};
    const auto start = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    std::int64_t done = 0;
    const auto layer = calibrate_layer(*checkpoint, 0, options, stream, [&] {
      if (++done % 16 == 0) fmt::print(stderr, "{} experts, {:.1f} s\n", done, seconds());
      return true;
    });
    if (!layer) return fail(layer.status().message());
    fmt::print("{} {} {}, {} experts of {} x {}, {} tokens, {} threads: {:.2f} s\n", o.backend, o.scheme,
               o.method, o.experts, o.hidden, o.intermediate, o.tokens, options.threads, seconds());
  }
  return 0;
}

}  // namespace
}  // namespace gatefold

int main(int argc, char** argv) {
  gatefold::Options options;
  CLI::App app("GPTQ of one MoE layer");
  app.add_option("--backend", options.backend)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--scheme", options.scheme);
  app.add_option("--method", options.method);
  app.add_option("--directory", options.directory);
  app.add_option("--tokens", options.tokens);
  app.add_option("--experts", options.experts);
  app.add_option("--hidden", options.hidden);
  app.add_option("--intermediate", options.intermediate);
  app.add_option("--top-k", options.top_k);
  app.add_option("--threads", options.threads);
  app.add_option("--runs", options.runs, "The first includes what is allocated and loaded once");
  CLI11_PARSE(app, argc, argv);
  return gatefold::run(options);
}
