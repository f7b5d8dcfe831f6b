// Checkpoint directories: which files are read, what their tensors must be, and what is said if they are not.
#include "gatefold/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>

#include "checkpoint_files.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// A small model, all tensors different; to be broken before `open`.
class Model {
 public:
  explicit Model(const std::string& family = "qwen3_moe") {
    config = {{"model_type", family},
              {"num_hidden_layers", 2},
              {"hidden_size", 8},
              {"vocab_size", 16},
              {"intermediate_size", 4},
              {"max_position_embeddings", 32},
              {"num_attention_heads", 2},
              {"num_experts_per_tok", 1},
              {"moe_intermediate_size", 4},
              {"num_experts", 2},
              {"mlp_only_layers", {0}},
              {"dtype", "bfloat16"},
              {"shared_expert_intermediate_size", 6}};
    add("model.layers.1.mlp.gate.weight", "BF16", {2, 8});
    for (const char* expert : {"0", "1"}) {
      const std::string module = std::string("model.layers.1.mlp.experts.") + expert;
      add(module + ".gate_proj.weight", "BF16", {4, 8});
      add(module + ".up_proj.weight", "BF16", {4, 8});
      add(module + ".down_proj.weight", "BF16", {8, 4});
    }
  }

  void add(const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    FileTensor tensor{name, dtype, shape,
                      std::string(static_cast<std::size_t>(count * bits(*find_dtype(dtype)) / 8), '\0')};
    for (char& c : tensor.data) c = static_cast<char>(next_++ % 60);
    tensors.push_back(tensor);
  }
  FileTensor& tensor(const std::string& name) {
    for (FileTensor& tensor : tensors)
      if (tensor.name == name) return tensor;
    ADD_FAILURE() << name;
    return tensors.front();
  }
  void remove(const std::string& name) {
    std::erase_if(tensors, [&](const FileTensor& tensor) { return tensor.name == name; });
  }
  void replace(const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape) {
    remove(name);
    add(name, dtype, shape);
  }

  Result<Checkpoint> open() const {
    save_file(directory.path() / "config.json", config.dump());
    save_file(directory.path() / "model.safetensors", safetensors(tensors));
    return Checkpoint::open(directory.path());
  }
  Checkpoint open_good() const {
    auto checkpoint = open();
    if (!checkpoint) throw std::runtime_error(checkpoint.status().message());
    return *checkpoint;
  }

  json config;
  std::vector<FileTensor> tensors;
  TemporaryDirectory directory;

 private:
  unsigned next_ = 0;
};

void expect_bad(const Result<Checkpoint>& checkpoint, Code code,
                std::initializer_list<std::string_view> parts) {
  ASSERT_FALSE(checkpoint);
  expect_error(checkpoint.status(), code, parts);
}

std::string bytes_of(const Result<ExpertMatrix>& matrix) {
  EXPECT_TRUE(matrix) << matrix.status().message();
  if (!matrix) return "";
  const auto& view = std::get<MatrixView>(*matrix);
  return {static_cast<const char*>(view.data),
          static_cast<std::size_t>(view.rows * view.cols * bits(view.dtype) / 8)};
}

const std::string gate0 = "model.layers.1.mlp.experts.0.gate_proj.weight";

// --- Files ---

TEST(CheckpointFiles, NoSuchThing) {
  const TemporaryDirectory directory;
  expect_bad(Checkpoint::open(directory.path() / "nowhere"), Code::io_error, {"nowhere", "No such file"});
  expect_bad(Checkpoint::open(directory.path()), Code::io_error, {"config.json", "No such file"});
  save_file(directory.path() / "config.json", Model().config.dump());
  expect_bad(Checkpoint::open(directory.path()), Code::io_error,
             {directory.path().string(), "model.safetensors", "model-*-of-*.safetensors"});
  expect_bad(Checkpoint::open(directory.path() / "config.json"), Code::io_error, {"config.json"});
}

TEST(CheckpointFiles, ZeroBytesTruncatedOrLonger) {
  const Model model;
  ASSERT_TRUE(model.open());
  const fs::path path = model.directory.path() / "model.safetensors";
  const std::string whole = load_file(path);
  const auto expect_cut = [&](const std::string& content, std::initializer_list<std::string_view> parts) {
    save_file(path, content);
    const auto checkpoint = Checkpoint::open(model.directory.path());
    expect_bad(checkpoint, Code::bad_file, {path.string()});
    expect_bad(checkpoint, Code::bad_file, parts);
  };
  expect_cut("", {"0 bytes"});
  expect_cut(whole.substr(0, 100), {"file has 100"});
  expect_cut(whole.substr(0, whole.size() - 1), {"truncated"});
  expect_cut(whole + "x", {"bytes of data"});
  save_file(model.directory.path() / "config.json", "");
  expect_bad(Checkpoint::open(model.directory.path()), Code::bad_file, {"config.json", "JSON object"});
}

TEST(CheckpointFiles, NotAFile) {
  const Model model;
  ASSERT_TRUE(model.open());
  const fs::path path = model.directory.path() / "model.safetensors";
  fs::remove(path);
  fs::create_directory(path);
  expect_bad(Checkpoint::open(model.directory.path()), Code::io_error, {path.string(), "not a regular file"});
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  expect_bad(Checkpoint::open(model.directory.path()), Code::io_error, {path.string(), "not a regular file"});
}

TEST(CheckpointFiles, Unreadable) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read everything";
  const Model model;
  ASSERT_TRUE(model.open());
  fs::permissions(model.directory.path() / "model.safetensors", fs::perms::none);
  expect_bad(Checkpoint::open(model.directory.path()), Code::io_error,
             {"model.safetensors", "Permission denied"});
}

TEST(CheckpointFiles, OtherFilesAreNotWeights) {
  const Model model;
  save_file(model.directory.path() / "expected.safetensors", "nonsense");
  save_file(model.directory.path() / "model-of.safetensors", "nonsense");
  const auto checkpoint = model.open();
  ASSERT_TRUE(checkpoint) << checkpoint.status().message();
  ASSERT_EQ(checkpoint->files().size(), 1u);
  EXPECT_EQ(checkpoint->files()[0].filename(), "model.safetensors");
}

/// The model in two shards: tensor i is in shard i % 2.
class Shards : public testing::Test {
 protected:
  Shards() {
    std::vector<FileTensor> shards[2];
    for (std::size_t i = 0; i < model.tensors.size(); ++i) {
      shards[i % 2].push_back(model.tensors[i]);
      index["weight_map"][model.tensors[i].name] = names[i % 2];
    }
    save("config.json", model.config.dump());
    for (int i = 0; i < 2; ++i) save(names[i], safetensors(shards[i]));
  }
  void save(const std::string& name, const std::string& content) {
    save_file(directory.path() / name, content);
  }
  void save_index() { save("model.safetensors.index.json", index.dump()); }
  Result<Checkpoint> open() const { return Checkpoint::open(directory.path()); }

  void expect_same() const {
    const auto checkpoint = open();
    ASSERT_TRUE(checkpoint) << checkpoint.status().message();
    EXPECT_EQ(checkpoint->files().size(), 2u);
    ASSERT_EQ(checkpoint->tensors().size(), model.tensors.size());
    for (const FileTensor& tensor : model.tensors) {
      const auto view = checkpoint->tensor(tensor.name);
      ASSERT_TRUE(view);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(view->data), view->bytes), tensor.data);
      EXPECT_EQ(view->shape, tensor.shape);
    }
  }

  const std::string names[2] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
  Model model;
  json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", json::object()}};
  TemporaryDirectory directory;
};

TEST_F(Shards, WithIndex) {
  save_index();
  expect_same();
}

TEST_F(Shards, WithoutIndex) {
  expect_same();
}

TEST_F(Shards, IncompleteWithoutIndex) {
  fs::remove(directory.path() / names[1]);
  expect_bad(open(), Code::io_error, {"1 of 2 shards"});
  save("model-00002-of-00003.safetensors", safetensors(std::vector<FileTensor>{}));
  expect_bad(open(), Code::bad_file, {"model-00002-of-00003.safetensors"});
  fs::remove(directory.path() / names[0]);
  expect_bad(open(), Code::bad_file, {"model-00002-of-00003.safetensors", "1 of 3"});
}

TEST_F(Shards, IndexNamesAMissingFile) {
  save_index();
  fs::remove(directory.path() / names[1]);
  expect_bad(open(), Code::io_error, {names[1], "No such file"});
}

TEST_F(Shards, IndexNamesAMissingTensor) {
  index["weight_map"]["lm_head.weight"] = names[0];
  save_index();
  expect_bad(open(), Code::bad_file, {"index.json", "'lm_head.weight'", names[0]});
}

TEST_F(Shards, IndexContradictsTheShards) {
  index["weight_map"][gate0] = names[0];
  save_index();
  expect_bad(open(), Code::bad_file, {"index.json", gate0, names[0], names[1]});
}

TEST_F(Shards, ATensorInTwoShards) {
  save_index();
  save(names[0], safetensors(model.tensors));
  expect_bad(open(), Code::bad_file, {names[0], "experts.0.down_proj.weight", "also in", names[1]});
}

TEST_F(Shards, IndexBesideAnotherModel) {
  save_index();
  save("model.safetensors", safetensors(model.tensors));
  expect_bad(open(), Code::bad_file, {"model.safetensors", "index"});
}

TEST_F(Shards, IndexOfOneFile) {
  save("model.safetensors", safetensors(model.tensors));
  for (auto& [name, shard] : index["weight_map"].items()) shard = "model.safetensors";
  save_index();
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint) << checkpoint.status().message();
  EXPECT_EQ(checkpoint->files().size(), 1u);
}

// What is accepted in spite of changed bytes can be read to its last byte (under ASan: without a fault).
TEST(CheckpointFiles, ChangedBytes) {
  const Model model;
  ASSERT_TRUE(model.open());
  const fs::path files[] = {model.directory.path() / "model.safetensors",
                            model.directory.path() / "config.json"};
  std::mt19937 random(1);
  int refused = 0, accepted = 0;
  for (const fs::path& file : files) {
    const std::string good = load_file(file);
    const std::size_t end = std::min<std::size_t>(good.size(), 1200);  // the header, or all of the config
    for (int i = 0; i < 300; ++i) {
      std::string bad = good;
      for (int change = random() % 3; change >= 0; --change)
        bad[random() % end] = "0123456789[]{}:,\"-.e\0\xff"[random() % 22];
      save_file(file, bad);
      const auto checkpoint = Checkpoint::open(model.directory.path());
      ++(checkpoint ? accepted : refused);
      if (!checkpoint) {
        EXPECT_NE(checkpoint.status().message().find(model.directory.path().string()), std::string::npos)
            << checkpoint.status().message();
        continue;
      }
      for (const TensorEntry& entry : checkpoint->tensors()) {
        const TensorView view = checkpoint->view(entry);
        EXPECT_GE(std::count(view.data, view.data + view.bytes, std::byte{}), 0);
      }
      for (int layer = 0; layer < std::min(checkpoint->config().layers, 3); ++layer)
        (void)checkpoint->expert(layer, 0, Projection::down);
    }
    save_file(file, good);
  }
  EXPECT_GT(refused, 200);
  EXPECT_GT(accepted, 5);
}

// --- Tensors ---

TEST(CheckpointTensors, PerExpert) {
  Model model;
  model.add("model.layers.1.mlp.experts.00.gate_proj.weight", "F32", {3});  // no name that anyone writes
  const Checkpoint checkpoint = model.open_good();
  EXPECT_EQ(checkpoint.convention(), "unquantized");
  EXPECT_EQ(*checkpoint.stored_scheme(), SchemeId::bf16);
  EXPECT_EQ(bytes_of(checkpoint.expert(1, 0, Projection::gate)), model.tensor(gate0).data);
  EXPECT_EQ(bytes_of(checkpoint.expert(1, 1, Projection::up)),
            model.tensor("model.layers.1.mlp.experts.1.up_proj.weight").data);
  const auto down = std::get<MatrixView>(*checkpoint.expert(1, 1, Projection::down));
  EXPECT_EQ(down.rows, 8);
  EXPECT_EQ(down.cols, 4);
  const auto groups = checkpoint.expert_groups();
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].layer, 1);
  EXPECT_EQ(groups[0].stored, "bf16");
  EXPECT_EQ(groups[0].bytes, 6u * 32 * 2);
  EXPECT_EQ(checkpoint.router(1)->shape, (std::vector<std::int64_t>{2, 8}));
  EXPECT_EQ(checkpoint.router_bias(1), nullptr);
  EXPECT_EQ(checkpoint.router_correction_bias(1), nullptr);
  EXPECT_TRUE(checkpoint.is_expert_tensor(gate0));
  for (const char* name :
       {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.0.gate_proj",
        "model.layers.1.mlp.experts.00.gate_proj.weight", "layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.experts.0.gate_projx.weight", ""})
    EXPECT_FALSE(checkpoint.is_expert_tensor(name)) << name;
  EXPECT_EQ(checkpoint.config_text(), model.config.dump());
}

TEST(CheckpointTensors, ReleasedPagesComeBack) {
  const auto checkpoint = Checkpoint::open(GATEFOLD_SOURCE_DIR "/models/tiny-moe");
  ASSERT_TRUE(checkpoint) << checkpoint.status().message();
  for (const TensorEntry& entry : checkpoint->tensors()) {
    const TensorView view = checkpoint->view(entry);
    const std::vector<std::byte> before(view.data, view.data + view.bytes);
    checkpoint->release(entry);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), view.data)) << entry.name;
  }
}

TEST(CheckpointTensors, AskedForWhatIsNotThere) {
  Model model;
  model.remove(gate0);
  model.remove("model.layers.1.mlp.gate.weight");
  const Checkpoint checkpoint = model.open_good();
  const std::string directory = model.directory.path().string();
  expect_error(checkpoint.expert(1, 0, Projection::gate).status(), Code::bad_file,
               {directory, "no tensor '" + gate0 + "'"});
  EXPECT_TRUE(checkpoint.expert(1, 1, Projection::gate));
  expect_error(checkpoint.router(1).status(), Code::bad_file,
               {directory, "'model.layers.1.mlp.gate.weight'"});
  expect_error(checkpoint.tensor("lm_head.weight").status(), Code::bad_file, {directory, "'lm_head.weight'"});
  expect_error(checkpoint.expert(0, 0, Projection::gate).status(), Code::invalid_argument,
               {"layer 0", "dense"});
  expect_error(checkpoint.expert(2, 0, Projection::gate).status(), Code::invalid_argument,
               {"no layer 2", "2"});
  expect_error(checkpoint.expert(-1, 0, Projection::gate).status(), Code::invalid_argument, {"no layer -1"});
  expect_error(checkpoint.expert(1, 2, Projection::gate).status(), Code::invalid_argument,
               {"no expert 2", "2"});
  expect_error(checkpoint.expert(1, -1, Projection::gate).status(), Code::invalid_argument, {"no expert -1"});
  expect_error(checkpoint.shared_expert(1, Projection::up).status(), Code::invalid_argument,
               {"no shared expert"});
  expect_error(checkpoint.shared_expert_gate(1).status(), Code::invalid_argument, {"shared expert"});
}

TEST(CheckpointTensors, NoExpertsAtAll) {
  Model model;
  model.tensors.resize(1);
  const Checkpoint checkpoint = model.open_good();
  expect_error(checkpoint.stored_scheme().status(), Code::bad_file, {"no tensors of routed experts"});
  EXPECT_TRUE(checkpoint.expert_groups().empty());
}

TEST(CheckpointTensors, WrongShapeOrDtype) {
  const auto expect_wrong = [](const std::string& name, const std::string& dtype,
                               const std::vector<std::int64_t>& shape,
                               std::initializer_list<std::string_view> parts) {
    Model model;
    model.replace(name, dtype, shape);
    const auto checkpoint = model.open();
    expect_bad(checkpoint, Code::bad_file, {"model.safetensors: tensor '" + name + "'"});
    expect_bad(checkpoint, Code::bad_file, parts);
  };
  expect_wrong(gate0, "BF16", {8, 4}, {"[8, 4]", "[4, 8]"});
  expect_wrong(gate0, "BF16", {32}, {"[32]", "[4, 8]"});
  expect_wrong(gate0, "BF16", {4, 8, 1}, {"[4, 8, 1]", "[4, 8]"});
  expect_wrong(gate0, "F8_E4M3", {4, 8}, {"F8_E4M3", "BF16 or F16 or F32", "no quantization_config"});
  expect_wrong("model.layers.1.mlp.experts.1.down_proj.weight", "BF16", {4, 8}, {"[4, 8]", "[8, 4]"});
  expect_wrong("model.layers.1.mlp.gate.weight", "BF16", {3, 8}, {"[3, 8]", "[2, 8]"});
  expect_wrong("model.layers.1.mlp.gate.weight", "I32", {2, 8}, {"I32", "BF16"});
  expect_wrong("model.layers.1.mlp.gate.e_score_correction_bias", "F32", {3}, {"[3]", "[2]"});
}

TEST(CheckpointTensors, ConfigAndTensorsDisagree) {
  Model model;
  model.add("model.layers.1.mlp.experts.0.gate_proj.weight_scale", "F32", {4, 1});
  expect_bad(model.open(), Code::bad_file,
             {"model.safetensors", "gate_proj.weight_scale'", "unquantized", "config.json",
              "no quantization_config"});

  Model experts;
  experts.config["num_experts"] = 1;
  experts.replace("model.layers.1.mlp.gate.weight", "BF16", {1, 8});
  expect_bad(experts.open(), Code::bad_file, {"experts.1.", "config.json", "there are 1 experts"});

  Model dense;
  dense.add("model.layers.0.mlp.experts.0.gate_proj.weight", "BF16", {4, 8});
  expect_bad(dense.open(), Code::bad_file,
             {"layers.0.mlp.experts.0.gate_proj", "config.json", "layer 0 has no experts"});

  Model unknown;
  unknown.config["quantization_config"] = {{"quant_method", "telepathy"}};
  expect_bad(unknown.open(), Code::unsupported, {"config.json", "telepathy", "compressed-tensors"});
  unknown.config["quantization_config"] = json::object();
  expect_bad(unknown.open(), Code::unsupported, {"config.json", "quant_method"});
}

TEST(CheckpointTensors, LayersBeyondTheModelAreNotTouched) {
  Model model;
  model.add("model.layers.2.mlp.experts.7.gate_proj.weight", "F8_E4M3", {1});
  const Checkpoint checkpoint = model.open_good();
  EXPECT_FALSE(checkpoint.is_expert_tensor("model.layers.2.mlp.experts.7.gate_proj.weight"));
}

TEST(CheckpointTensors, StoredInSeveralWays) {
  Model model;
  model.replace("model.layers.1.mlp.experts.1.up_proj.weight", "F16", {4, 8});
  const Checkpoint checkpoint = model.open_good();
  expect_error(checkpoint.stored_scheme().status(), Code::unsupported,
               {"experts.1.up_proj.weight", "f16", "bf16"});
  EXPECT_EQ(checkpoint.expert_groups()[0].stored, "other: bf16 and f16");
}

TEST(CheckpointTensors, DtypeFollowsTheTensorsIfTheConfigHasNone) {
  Model model;
  model.config.erase("dtype");
  for (FileTensor& tensor : model.tensors) tensor.dtype = "F16";
  const Checkpoint half = model.open_good();
  EXPECT_EQ(half.config().dtype, DType::f16);
  EXPECT_EQ(half.config().moe.scheme, SchemeId::f16);

  Model full;
  full.config.erase("dtype");
  for (FileTensor& tensor : full.tensors) tensor.dtype = "F32", tensor.data += tensor.data;
  const Checkpoint single = full.open_good();
  EXPECT_EQ(single.config().dtype, DType::f32);
  EXPECT_EQ(*single.stored_scheme(), SchemeId::bf16);
  EXPECT_EQ(single.expert_groups()[0].stored, "f32");
  EXPECT_EQ(std::get<MatrixView>(*single.expert(1, 0, Projection::gate)).dtype, DType::f32);
}

TEST(CheckpointTensors, NamesInALargerModel) {
  for (const std::string prefix : {"language_model.model.", "model.language_model.", ""}) {
    Model model;
    for (FileTensor& tensor : model.tensors) tensor.name = prefix + tensor.name.substr(6);
    model.add("vision.patches", "F32", {2});
    const Checkpoint checkpoint = model.open_good();
    EXPECT_EQ(bytes_of(checkpoint.expert(1, 0, Projection::gate)),
              model.tensor(prefix + gate0.substr(6)).data);
    EXPECT_TRUE(checkpoint.router(1)) << prefix;
  }
}

TEST(CheckpointTensors, SharedExpert) {
  Model model("qwen2_moe");
  const std::string shared = "model.layers.1.mlp.shared_expert";
  model.add(shared + ".gate_proj.weight", "BF16", {6, 8});
  model.add(shared + ".down_proj.weight", "BF16", {8, 5});
  model.add(shared + "_gate.weight", "BF16", {1, 8});
  const Checkpoint checkpoint = model.open_good();
  const auto gate = checkpoint.shared_expert(1, Projection::gate);
  ASSERT_TRUE(gate) << gate.status().message();
  const MatrixView& view = std::get<MatrixView>(*gate);
  EXPECT_EQ(view.rows, 6);
  EXPECT_EQ(std::memcmp(view.data, model.tensor(shared + ".gate_proj.weight").data.data(), 6 * 8 * 2), 0);
  expect_error(checkpoint.shared_expert(1, Projection::up).status(), Code::bad_file,
               {"'" + shared + ".up_proj.weight'"});
  expect_error(checkpoint.shared_expert(1, Projection::down).status(), Code::bad_file,
               {shared + ".down_proj.weight", "[8, 5]", "[8, 6]"});
  EXPECT_TRUE(checkpoint.shared_expert_gate(1));
  EXPECT_FALSE(checkpoint.is_expert_tensor(shared + ".gate_proj.weight"));
  model.replace(shared + "_gate.weight", "BF16", {8});
  expect_bad(model.open(), Code::bad_file, {shared + "_gate.weight", "[8]", "[1, 8]"});
}

TEST(CheckpointTensors, CorrectionBiasInARow) {
  Model model("ernie4_5_moe");
  model.config.update({{"moe_num_experts", 2}, {"moe_k", 1}, {"moe_layer_start_index", 1}});
  model.add("model.layers.1.mlp.moe_statics.e_score_correction_bias", "F32", {1, 2});
  EXPECT_NE(model.open_good().router_correction_bias(1), nullptr);
}

TEST(CheckpointTensors, FusedExperts) {
  Model both;
  both.add("model.layers.1.mlp.experts.down_proj", "BF16", {2, 8, 4});
  expect_bad(both.open(), Code::bad_file, {"model.layers.1.mlp.experts.down_proj", "twice"});

  Model extra;
  extra.add("model.layers.1.mlp.experts.gate_up_proj_scales", "U8", {2, 8, 1});
  expect_bad(extra.open(), Code::bad_file, {"gate_up_proj_scales", "unquantized", "no quantization_config"});
}

}  // namespace
}  // namespace gatefold
