// The model of this repository, as it is and with its experts fused.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "checkpoint_files.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

const fs::path tiny_moe = GATEFOLD_SOURCE_DIR "/models/tiny-moe";
constexpr Projection projections[] = {Projection::gate, Projection::up, Projection::down};

Checkpoint open_good(const fs::path& directory) {
  auto checkpoint = Checkpoint::open(directory);
  if (!checkpoint) throw std::runtime_error(checkpoint.status().message());
  return *checkpoint;
}

std::string bytes_of(const Result<ExpertMatrix>& matrix) {
  EXPECT_TRUE(matrix) << matrix.status().message();
  if (!matrix) return "";
  const auto& view = std::get<MatrixView>(*matrix);
  return {static_cast<const char*>(view.data),
          static_cast<std::size_t>(view.rows * view.cols * bits(view.dtype) / 8)};
}

// --- tiny-moe ---

TEST(TinyMoe, Opens) {
  const Checkpoint checkpoint = open_good(tiny_moe);
  const ModelConfig& config = checkpoint.config();
  EXPECT_EQ(config.model_type, "qwen3_moe");
  EXPECT_EQ(config.layers, 4);
  EXPECT_EQ(config.moe.experts, 16);
  EXPECT_EQ(config.moe.top_k, 4);
  EXPECT_EQ(config.moe.intermediate, 128);
  EXPECT_EQ(checkpoint.tensors().size(), 230u);
  EXPECT_EQ(*checkpoint.stored_scheme(), SchemeId::bf16);
  EXPECT_EQ(checkpoint.expert_groups().size(), 4u);
  const auto experts =
      std::count_if(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                    [&](const TensorEntry& entry) { return checkpoint.is_expert_tensor(entry.name); });
  EXPECT_EQ(experts, 4 * 16 * 3);
  EXPECT_TRUE(std::is_sorted(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                             [](const auto& a, const auto& b) { return a.name < b.name; }));
}

/// Layers beyond the model's predict further tokens: they have routers, too.
TEST(TinyMoe, RoutersOfAnyLayerAreNoLinearLayers) {
  auto tensors = load_tensors(open_good(tiny_moe));
  for (const char* module :
       {"model.layers.3.mlp.shared_expert_gate", "model.layers.4.mlp.gate",
        "model.layers.4.mlp.shared_expert_gate", "mtp.0.mlp.gate", "model.layers.4.eh_proj"})
    tensors.push_back({std::string(module) + ".weight", "BF16", {1, 2}, "abcd"});
  const TemporaryDirectory directory;
  fs::copy(tiny_moe / "config.json", directory.path());
  save_file(directory.path() / "model.safetensors", safetensors(tensors));
  const auto before = open_good(tiny_moe).other_unquantized_layers();
  const auto layers = open_good(directory.path()).other_unquantized_layers();
  ASSERT_EQ(layers.size(), before.size() + 1);
  EXPECT_TRUE(std::any_of(layers.begin(), layers.end(),
                          [](const StoredLayer& layer) { return layer.module == "model.layers.4.eh_proj"; }));
}

/// tiny-moe with each layer's experts in two tensors.
class FusedTinyMoe : public testing::Test {
 protected:
  FusedTinyMoe() {
    for (FileTensor& tensor : load_tensors(separate))
      if (!separate.is_expert_tensor(tensor.name)) tensors.push_back(std::move(tensor));
    const MoeSpec& moe = separate.config().moe;
    for (int layer = 0; layer < separate.config().layers; ++layer) {
      const std::string experts = "model.layers." + std::to_string(layer) + ".mlp.experts.";
      FileTensor gate_up{
          experts + "gate_up_proj", "BF16", {moe.experts, 2 * moe.intermediate, moe.hidden}, ""};
      FileTensor down{experts + "down_proj", "BF16", {moe.experts, moe.hidden, moe.intermediate}, ""};
      for (int expert = 0; expert < moe.experts; ++expert) {
        gate_up.data += bytes_of(separate.expert(layer, expert, Projection::gate));
        gate_up.data += bytes_of(separate.expert(layer, expert, Projection::up));
        down.data += bytes_of(separate.expert(layer, expert, Projection::down));
      }
      tensors.push_back(std::move(gate_up));
      tensors.push_back(std::move(down));
    }
  }
  Result<Checkpoint> open() const {
    save_file(directory.path() / "config.json", separate.config_text());
    save_file(directory.path() / "model.safetensors", safetensors(tensors));
    return Checkpoint::open(directory.path());
  }

  const Checkpoint separate = open_good(tiny_moe);
  std::vector<FileTensor> tensors;
  TemporaryDirectory directory;
};

TEST_F(FusedTinyMoe, EqualsSeparate) {
  const auto fused = open();
  ASSERT_TRUE(fused) << fused.status().message();
  EXPECT_EQ(*fused->stored_scheme(), SchemeId::bf16);
  for (int layer = 0; layer < separate.config().layers; ++layer)
    for (int expert = 0; expert < separate.config().moe.experts; ++expert)
      for (const Projection projection : projections)
        EXPECT_EQ(bytes_of(fused->expert(layer, expert, projection)),
                  bytes_of(separate.expert(layer, expert, projection)))
            << layer << ' ' << expert << ' ' << name(projection);
  const auto groups = fused->expert_groups(), expected = separate.expert_groups();
  ASSERT_EQ(groups.size(), expected.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    EXPECT_EQ(groups[i].stored, "bf16");
    EXPECT_EQ(groups[i].bytes, expected[i].bytes);
  }
  EXPECT_TRUE(fused->is_expert_tensor("model.layers.3.mlp.experts.gate_up_proj"));
  EXPECT_TRUE(fused->is_expert_tensor("model.layers.3.mlp.experts.down_proj"));
  expect_error(fused->expert(0, 16, Projection::gate).status(), Code::invalid_argument, {"no expert 16"});
}

TEST_F(FusedTinyMoe, WrongShape) {
  FileTensor& gate_up = tensors[tensors.size() - 2];
  gate_up.shape = {16, 128, 512};
  expect_error(open().status(), Code::bad_file, {gate_up.name, "[16, 128, 512]", "[16, 256, 256]"});
  gate_up.shape = {15, 256, 256};
  gate_up.data.resize(15 * 256 * 256 * 2);
  expect_error(open().status(), Code::bad_file, {gate_up.name, "[15, 256, 256]", "[16, 256, 256]"});
}

}  // namespace
}  // namespace gatefold
