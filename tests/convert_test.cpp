#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <random>

#include "checkpoint/json.h"
#include "checkpoint/plain_view.h"
#include "checkpoint/safetensors_writer.h"
#include "gatefold/checkpoint.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const fs::path tiny_moe = GATEFOLD_SOURCE_DIR "/models/tiny-moe";

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::map<std::string, std::string> read_directory(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    files[entry.path().filename().string()] = entry.is_directory() ? "directory" : read_file(entry.path());
  return files;
}

ConvertOptions options_for(SchemeId id, std::uint64_t shard_bytes = 1 << 30, int threads = 0) {
  ConvertOptions options;
  options.scheme = id;
  options.shard_bytes = shard_bytes;
  options.threads = threads;
  return options;
}

/// A new directory per test; `names` lists what is in it, temporaries included.
class Convert : public testing::Test {
 protected:
  Convert() : root_(fs::path(testing::TempDir()) / ("convert-" + std::to_string(::getpid()))) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~Convert() override { fs::remove_all(root_); }

  static Checkpoint open(const fs::path& directory) {
    Result<Checkpoint> checkpoint = Checkpoint::open(directory);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    return std::move(*checkpoint);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(root_))
      found.push_back(entry.path().filename());
    return found;
  }
  void expect_error(const Result<ConvertReport>& report, Code code,
                    std::initializer_list<std::string_view> words) const {
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.status().code(), code) << report.status().message();
    for (const std::string_view word : words)
      EXPECT_NE(report.status().message().find(word), std::string::npos)
          << word << " in: " << report.status().message();
  }

  const fs::path root_;
};

/// A model of random bf16 weights, made to order.
struct Model {
  int layers = 1, experts = 2, hidden = 64, intermediate = 32, top_k = 1;
  bool fused = false;
  std::string family = "qwen3_moe";
  std::map<std::string, float> poison = {};  ///< tensor and what its element 33 becomes

  void write(const fs::path& directory, std::uint64_t shard_bytes = 1 << 30) const {
    fs::create_directories(directory);
    const bool mixtral = family == "mixtral", gpt_oss = family == "gpt_oss";
    std::vector<PlannedTensor> plan{{"model.embed_tokens.weight", DType::bf16, {256, hidden}},
                                    {"model.norm.weight", DType::f32, {hidden}}};
    for (int layer = 0; layer < layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      const std::string block = prefix + (mixtral ? "block_sparse_moe." : "mlp.");
      plan.push_back({prefix + "self_attn.q_proj.weight", DType::bf16, {hidden, hidden}});
      plan.push_back({block + (gpt_oss ? "router" : "gate") + ".weight", DType::bf16, {experts, hidden}});
      if (gpt_oss) {
        plan.push_back({block + "router.bias", DType::bf16, {experts}});
        plan.push_back({block + "experts.gate_up_proj", DType::bf16, {experts, hidden, 2 * intermediate}});
        plan.push_back({block + "experts.gate_up_proj_bias", DType::bf16, {experts, 2 * intermediate}});
        plan.push_back({block + "experts.down_proj", DType::bf16, {experts, intermediate, hidden}});
        plan.push_back({block + "experts.down_proj_bias", DType::bf16, {experts, hidden}});
      } else if (fused) {
        plan.push_back({block + "experts.gate_up_proj", DType::bf16, {experts, 2 * intermediate, hidden}});
        plan.push_back({block + "experts.down_proj", DType::bf16, {experts, hidden, intermediate}});
      }
      for (int expert = 0; !fused && expert < experts; ++expert) {
        const std::string module = block + "experts." + std::to_string(expert) + ".";
        plan.push_back(
            {module + (mixtral ? "w1" : "gate_proj") + ".weight", DType::bf16, {intermediate, hidden}});
        plan.push_back(
            {module + (mixtral ? "w3" : "up_proj") + ".weight", DType::bf16, {intermediate, hidden}});
        plan.push_back(
            {module + (mixtral ? "w2" : "down_proj") + ".weight", DType::bf16, {hidden, intermediate}});
      }
    }
    Result<SafetensorsWriter> writer = SafetensorsWriter::create(directory, plan, shard_bytes);
    ASSERT_TRUE(writer.ok()) << writer.status().message();
    std::mt19937 random(5);
    for (std::size_t i = 0; i < plan.size(); ++i) {
      std::vector<std::uint16_t> codes(plan[i].bytes() / 2);
      for (std::uint16_t& code : codes) code = static_cast<std::uint16_t>((random() & 0x80ff) | 0x3d00);
      if (const auto found = poison.find(plan[i].name); found != poison.end())
        codes[33] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(found->second) >> 16);
      ASSERT_TRUE(writer->write(i, std::as_bytes(std::span(codes))).ok());
    }
    ASSERT_TRUE(writer->finish().ok());
    json config{{"model_type", family},
                {"hidden_size", hidden},
                {"intermediate_size", intermediate},
                {"moe_intermediate_size", intermediate},
                {"num_hidden_layers", layers},
                {"num_attention_heads", 1},
                {"num_key_value_heads", 1},
                {"head_dim", 64},
                {"vocab_size", 256},
                {"num_experts", experts},
                {"num_local_experts", experts},
                {"num_experts_per_tok", top_k},
                {"torch_dtype", "bfloat16"},
                {"rms_norm_eps", 1e-6},
                {"max_position_embeddings", 64},
                {"norm_topk_prob", true}};
    if (mixtral || gpt_oss) config.erase("num_experts"), config.erase("moe_intermediate_size");
    std::ofstream(directory / "config.json") << config.dump(1);
  }
};

void expect_same_experts(const Checkpoint& stored, const Checkpoint& source, SchemeId id, int experts) {
  ASSERT_TRUE(stored.stored_scheme().ok()) << stored.stored_scheme().status().message();
  EXPECT_EQ(*stored.stored_scheme(), id);
  for (int layer = 0; layer < source.config().layers; ++layer)
    for (int expert = 0; expert < experts; ++expert)
      for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
        const Result<ExpertMatrix> original = source.expert(layer, expert, projection);
        const Result<ExpertMatrix> read = stored.expert(layer, expert, projection);
        ASSERT_TRUE(original.ok() && read.ok()) << read.status().message();
        QuantizeOptions options;  // gate and up are one matrix to engines, with one tensor scale
        for (const Projection p : {Projection::gate, Projection::up})
          if (projection != Projection::down)
            options.tensor_amax = std::max(options.tensor_amax,
                                           largest_magnitude(*plain_view(*source.expert(layer, expert, p))));
        const Result<QuantizedMatrix> expected = quantize(id, *plain_view(*original), options);
        ASSERT_TRUE(expected.ok());
        if (const auto* view = std::get_if<MatrixView>(&*read)) {
          ASSERT_FALSE(scheme(id).weight.quantized());
          EXPECT_EQ(0, std::memcmp(view->data, expected->values.data(), expected->values.size()));
          continue;
        }
        const QuantizedMatrix& matrix = std::get<QuantizedMatrix>(*read);
        EXPECT_EQ(matrix.values, expected->values);
        EXPECT_EQ(matrix.scales, expected->scales);
        EXPECT_EQ(matrix.zero_points, expected->zero_points);
        EXPECT_EQ(matrix.tensor_scale.value, expected->tensor_scale.value);
      }
}

TEST_F(Convert, EverySchemeReadsBackAsQuantizedOnTheFly) {
  const Checkpoint source = open(tiny_moe);
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    SCOPED_TRACE(scheme(id).name);
    const fs::path directory = root_ / scheme(id).name;
    std::uint64_t done = 0;
    const Result<ConvertReport> report =
        convert(source, directory, options_for(id), [&](const ConvertProgress& p) { done = p.done_bytes; });
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(done, report->source_bytes);
    EXPECT_EQ(report->shards, 1);
    EXPECT_EQ(report->written_bytes, fs::file_size(directory / "model.safetensors"));
    const Checkpoint stored = open(directory);
    EXPECT_EQ(stored.convention(), scheme(id).weight.quantized() ? "compressed-tensors" : "unquantized");
    expect_same_experts(stored, source, id, 16);

    // All else is there as it was.
    for (const TensorEntry& entry : source.tensors()) {
      if (source.is_expert_tensor(entry.name)) continue;
      const Result<TensorView> a = source.tensor(entry.name), b = stored.tensor(entry.name);
      ASSERT_TRUE(b.ok()) << b.status().message();
      EXPECT_EQ(a->dtype, b->dtype);
      EXPECT_EQ(a->shape, b->shape);
      EXPECT_EQ(0, std::memcmp(a->data, b->data, a->bytes)) << entry.name;
    }
    json config = json::parse(stored.config_text());
    config.erase("quantization_config");
    EXPECT_EQ(config, json::parse(source.config_text()));
  }
}

TEST_F(Convert, IgnoreNamesEveryOtherMatrix) {
  ASSERT_TRUE(convert(open(tiny_moe), root_ / "out", options_for(SchemeId::int4_g64)).ok());
  const json config = json::parse(read_file(root_ / "out" / "config.json"));
  const json& ignore = config["quantization_config"]["ignore"];
  for (const char* name : {"lm_head", "model.layers.0.mlp.gate", "model.layers.3.self_attn.q_proj"})
    EXPECT_NE(std::find(ignore.begin(), ignore.end(), name), ignore.end()) << name;
  EXPECT_EQ(ignore.dump().find("experts"), std::string::npos);
}

TEST_F(Convert, ShardsAndTheirIndex) {
  const Checkpoint source = open(tiny_moe);
  const Result<ConvertReport> report =
      convert(source, root_ / "out", options_for(SchemeId::mxfp4, 1'000'000));
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_GE(report->shards, 5);
  EXPECT_FALSE(fs::exists(root_ / "out" / "model.safetensors"));
  const json index = json::parse(read_file(root_ / "out" / "model.safetensors.index.json"));
  const Checkpoint stored = open(root_ / "out");
  EXPECT_EQ(stored.files().size(), static_cast<std::size_t>(report->shards));
  EXPECT_EQ(index["weight_map"].size(), stored.tensors().size());
  std::map<int, std::uint64_t> bytes;
  std::uint64_t total = 0;
  for (const TensorEntry& entry : stored.tensors()) {
    EXPECT_EQ(index["weight_map"][entry.name],
              stored.files()[static_cast<std::size_t>(entry.file)].filename().string());
    EXPECT_EQ(entry.begin % static_cast<std::uint64_t>(bits(entry.dtype) / 8), 0u) << "aligned to its type";
    bytes[entry.file] += entry.bytes();
    total += entry.bytes();
  }
  EXPECT_EQ(index["metadata"]["total_size"], total);
  for (const auto& [file, size] : bytes) EXPECT_LE(size, 1'000'000u);
  expect_same_experts(stored, source, SchemeId::mxfp4, 16);
}

TEST_F(Convert, ATensorLargerThanAShardGetsItsOwn) {
  ASSERT_TRUE(convert(open(tiny_moe), root_ / "out", options_for(SchemeId::int4_g64, 1)).ok());
  const Checkpoint stored = open(root_ / "out");
  EXPECT_EQ(stored.files().size(), stored.tensors().size());
}

TEST_F(Convert, BytesDoNotDependOnThreads) {
  const Checkpoint source = open(tiny_moe);
  for (const char* name : {"nvfp4", "uint4_g32"}) {
    ConvertOptions options = options_for(*find_scheme(name), 2'000'000);
    for (const int threads : {1, 3}) {
      options.threads = threads;
      ASSERT_TRUE(convert(source, root_ / (name + std::to_string(threads)), options).ok());
    }
    EXPECT_TRUE(read_directory(root_ / (name + std::string("1"))) ==
                read_directory(root_ / (name + std::string("3"))));
  }
}

TEST_F(Convert, FusedAndShardedSourcesBecomePerExpertTensors) {
  for (const char* family : {"qwen3_moe", "mixtral"}) {
    const fs::path from = root_ / ("from-" + std::string(family)), to = root_ / ("to-" + std::string(family));
    Model{.layers = 2, .experts = 3, .fused = true, .family = family}.write(from, 5000);
    const Checkpoint source = open(from);
    EXPECT_GT(source.files().size(), 3u);
    const Result<ConvertReport> report = convert(source, to, options_for(SchemeId::int4_g32));
    ASSERT_TRUE(report.ok()) << report.status().message();
    const Checkpoint stored = open(to);
    const std::string module = family == std::string("mixtral")
                                   ? "model.layers.1.block_sparse_moe.experts.2.w3"
                                   : "model.layers.1.mlp.experts.2.up_proj";
    EXPECT_NE(stored.find(module + ".weight_packed"), nullptr);
    expect_same_experts(stored, source, SchemeId::int4_g32, 3);
  }
}

/// gpt-oss in 16 bits: [experts, k, n], rows of gate and up in turns, biases.
TEST_F(Convert, TransposedExpertsBecomePerExpertTensors) {
  Model{.layers = 2, .experts = 3, .fused = true, .family = "gpt_oss"}.write(root_ / "from");
  const Checkpoint source = open(root_ / "from");
  for (const SchemeId id : {SchemeId::int4_g32, SchemeId::nvfp4}) {
    const fs::path to = root_ / scheme(id).name;
    const Result<ConvertReport> report = convert(source, to, options_for(id));
    ASSERT_TRUE(report.ok()) << report.status().message();
    const Checkpoint stored = open(to);
    expect_same_experts(stored, source, id, 3);
    for (const char* bias : {"gate_up_proj_bias", "down_proj_bias"}) {
      const std::string name = "model.layers.1.mlp.experts." + std::string(bias);
      const Result<TensorView> was = source.tensor(name), is = stored.tensor(name);
      ASSERT_TRUE(was.ok() && is.ok());
      EXPECT_EQ(0, std::memcmp(was->data, is->data, was->bytes));
    }
  }
}

TEST_F(Convert, OtherFilesComeAlong) {
  const fs::path from = root_ / "from";
  Model{}.write(from);
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "merges.txt", "generation_config.json", "chat_template.jinja",
        "pytorch_model.bin", "notes.txt", ".hidden.json", "model.safetensors.index.json.bak"})
    std::ofstream(from / name) << name;
  fs::create_directories(from / "original");
  ASSERT_TRUE(convert(open(from), root_ / "to", options_for(SchemeId::fp8_channel)).ok());
  std::vector<std::string> names;
  for (const auto& [name, content] : read_directory(root_ / "to")) {
    names.push_back(name);
    if (name != "config.json" && name != "model.safetensors") {
      EXPECT_EQ(content, name);
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"chat_template.jinja", "config.json", "generation_config.json",
                                             "merges.txt", "model.safetensors", "tokenizer.json",
                                             "tokenizer.model"}));
}

TEST_F(Convert, AnExistingDestinationIsNotTouched) {
  const Checkpoint source = open(tiny_moe);
  fs::create_directories(root_ / "empty");
  std::ofstream(root_ / "file") << "precious";
  fs::create_symlink("nowhere", root_ / "link");
  for (const char* name : {"empty", "empty/", "file", "link"})
    expect_error(convert(source, root_ / name, {}), Code::invalid_argument, {"exists"});
  EXPECT_EQ(read_file(root_ / "file"), "precious");
  EXPECT_TRUE(fs::is_empty(root_ / "empty"));
  EXPECT_EQ(names().size(), 3u);
  expect_error(convert(source, root_ / "no" / "such", {}), Code::io_error, {"no"});
}

TEST_F(Convert, ADestinationThatAppearsMeanwhileIsNotTouched) {
  const Result<ConvertReport> report =
      convert(open(tiny_moe), root_ / "out", {},
              [&](const ConvertProgress&) { fs::create_directories(root_ / "out"); });
  expect_error(report, Code::invalid_argument, {"out", "exists"});
  EXPECT_TRUE(fs::is_empty(root_ / "out"));
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(Convert, ErrorsNameTheTensorAndLeaveNothing) {
  const auto convert_to = [&](const char* from, SchemeId id, bool allow_nonfinite = false) {
    ConvertOptions options = options_for(id);
    options.quantize.allow_nonfinite = allow_nonfinite;
    return convert(open(root_ / from), root_ / "out", options);
  };
  Model{.intermediate = 96}.write(root_ / "odd");
  expect_error(convert_to("odd", SchemeId::int4_g64), Code::invalid_argument,
               {"model.safetensors", "model.layers.0.mlp.experts.0.down_proj", "96", "64"});
  Model{.poison = {{"model.layers.0.mlp.experts.1.up_proj.weight", std::numeric_limits<float>::quiet_NaN()}}}
      .write(root_ / "nan");
  expect_error(convert_to("nan", SchemeId::int8), Code::invalid_argument,
               {"model.safetensors", "model.layers.0.mlp.experts.1.up_proj", "NaN", "[0, 33]"});
  EXPECT_EQ(names().size(), 2u);
  EXPECT_TRUE(convert_to("nan", SchemeId::int8, true).ok());

  fs::rename(root_ / "out", root_ / "int8");
  expect_error(convert_to("int8", SchemeId::int4_g32), Code::invalid_argument, {"quantized already", "int8"});
  expect_error(convert(open(root_ / "nan"), root_ / "out", options_for(SchemeId::int8, 0)),
               Code::invalid_argument, {"0"});
}

TEST_F(Convert, CancellingLeavesNothing) {
  std::atomic<int> asked = 0;
  ConvertOptions options;
  options.cancelled = [&] { return ++asked > 20; };
  expect_error(convert(open(tiny_moe), root_ / "out", options), Code::io_error, {"cancelled"});
  EXPECT_TRUE(names().empty());
}

/// Runs `body` in a process of its own, which may then change its limits.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// What is done is given back: a source that is mapped and read through would be resident as a whole.
TEST_F(Convert, MemoryDoesNotGrowWithTheModel) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer keeps what is freed";
#endif
  Model{.experts = 32, .hidden = 2048, .intermediate = 1024}.write(root_ / "large");
  EXPECT_GT(fs::file_size(root_ / "large" / "model.safetensors"), 400'000'000u);
  const int code = in_child([&] {
    rusage before{}, after{};
    ::getrusage(RUSAGE_SELF, &before);
    const bool ok =
        convert(*Checkpoint::open(root_ / "large"), root_ / "out", options_for(SchemeId::int8, 1 << 30, 1))
            .ok();
    ::getrusage(RUSAGE_SELF, &after);
    return !ok || after.ru_maxrss - before.ru_maxrss > 64 << 10;  // KiB
  });
  EXPECT_EQ(code, 0);
}

TEST_F(Convert, AFileThatMayNotGrowIsACleanError) {
  const int code = in_child([&] {
    const rlimit limit{2'000'000, 2'000'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::signal(SIGXFSZ, SIG_IGN);
    const Result<ConvertReport> report =
        convert(*Checkpoint::open(tiny_moe), root_ / "out", options_for(SchemeId::int8, 1 << 30, 1));
    return report.ok() || report.status().code() != Code::io_error ||
           report.status().message().find("model.safetensors") == std::string::npos;
  });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(names().empty());
}

TEST_F(Convert, AFullDiskIsACleanError) {
  const fs::path disk = root_ / "disk";
  fs::create_directories(disk);
  if (::mount("gatefold-test", disk.c_str(), "tmpfs", 0, "size=3m") != 0)
    GTEST_SKIP() << "mount is not permitted";
  const Result<ConvertReport> report = convert(open(tiny_moe), disk / "out", {});
  const bool empty = fs::is_empty(disk);
  ::umount(disk.c_str());
  expect_error(report, Code::io_error, {"model.safetensors", "No space left"});
  EXPECT_TRUE(empty);
}

// A process that is killed cannot clean up: what it leaves must not be taken for a model.
TEST_F(Convert, AKilledProcessLeavesNothingThatLooksWhole) {
  const int code = in_child([&] {
    (void)convert(*Checkpoint::open(tiny_moe), root_ / "out", options_for(SchemeId::int8, 1'000'000, 1),
                  [](const ConvertProgress& p) {
                    if (p.done_bytes * 2 > p.total_bytes) ::kill(::getpid(), SIGKILL);
                  });
    return 0;
  });
  EXPECT_EQ(code, 128 + SIGKILL);
  EXPECT_FALSE(fs::exists(root_ / "out"));
  const std::vector<std::string> left = names();
  ASSERT_EQ(left.size(), 1u);
  EXPECT_TRUE(left[0].starts_with(".out."));
  EXPECT_FALSE(Checkpoint::open(root_ / left[0]).ok());
  for (const auto& [name, content] : read_directory(root_ / left[0])) {
    EXPECT_NE(name, "config.json");
    EXPECT_EQ(content.substr(0, 8), std::string(8, '\0')) << name << " has no header length yet";
  }
  EXPECT_TRUE(convert(open(tiny_moe), root_ / "out", {}).ok());
}

}  // namespace
}  // namespace gatefold
