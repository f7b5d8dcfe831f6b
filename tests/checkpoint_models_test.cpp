// Real checkpoints: the model of this repository and, where the environment variable GATEFOLD_CHECKPOINTS
// names a folder of them, others with the values that their own software computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "checkpoint/source.h"
#include "checkpoint_files.h"
#include "gatefold/codec.h"
#include "gatefold/quantize.h"

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

// --- Checkpoints of other software ---

/// FIPS 180-4.
std::string sha256(std::string message) {
  std::uint32_t k[64], hash[8];
  // The constants are the fractions of the roots of the first primes.
  int count = 0;
  for (int prime = 2; count < 64; ++prime) {
    bool composite = false;
    for (int d = 2; d * d <= prime; ++d) composite |= prime % d == 0;
    if (composite) continue;
    const auto fraction = [](long double x) {
      return static_cast<std::uint32_t>((x - static_cast<long double>(static_cast<int>(x))) * 4294967296.0L);
    };
    if (count < 8) hash[count] = fraction(std::sqrt(static_cast<long double>(prime)));
    k[count++] = fraction(std::cbrt(static_cast<long double>(prime)));
  }
  const std::uint64_t bit_count = message.size() * 8;
  message += '\x80';
  message.resize((message.size() + 8 + 63) / 64 * 64 - 8, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) message += static_cast<char>(bit_count >> shift);

  for (std::size_t at = 0; at < message.size(); at += 64) {
    std::uint32_t w[64], s[8];
    for (std::size_t i = 0; i < 16; ++i) {
      std::memcpy(&w[i], message.data() + at + 4 * i, 4);
      w[i] = __builtin_bswap32(w[i]);
    }
    for (int i = 16; i < 64; ++i)
      w[i] = w[i - 16] + (std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
             (std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10);
    std::copy(hash, hash + 8, s);
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t t1 = s[7] + (std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25)) +
                               ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
      const std::uint32_t t2 = (std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22)) +
                               ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::copy_backward(s, s + 7, s + 8);
      s[4] += t1;
      s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) hash[i] += s[i];
  }
  std::string hex;
  for (const std::uint32_t word : hash)
    for (int shift = 28; shift >= 0; shift -= 4) hex += "0123456789abcdef"[word >> shift & 15];
  return hex;
}

TEST(Sha256, KnownAnswers) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

/// A matrix as row-major f32, -0 replaced by +0.
std::vector<float> to_floats(const ExpertMatrix& matrix) {
  std::vector<float> values;
  if (const auto* quantized = std::get_if<QuantizedMatrix>(&matrix)) {
    values.resize(static_cast<std::size_t>(quantized->n * quantized->k));
    dequantize(*quantized, values.data());
  } else {
    const auto& view = std::get<MatrixView>(matrix);
    EXPECT_EQ(view.dtype, DType::bf16);
    for (std::int64_t i = 0; i < view.rows * view.cols; ++i) {
      std::uint16_t code = 0;
      std::memcpy(&code, static_cast<const char*>(view.data) + 2 * i, 2);
      values.push_back(decode<formats::bf16>(code));
    }
  }
  for (float& value : values) value += 0.0f;
  return values;
}

nlohmann::json metadata(const fs::path& path) {
  const std::string file = load_file(path);
  std::uint64_t size = 0;
  std::memcpy(&size, file.data(), 8);
  return nlohmann::json::parse(file.substr(8, size)).at("__metadata__");
}

/// Every expert matrix of a checkpoint has the hash that its expected.safetensors states.
void expect_weights(const fs::path& directory) {
  const Checkpoint checkpoint = open_good(directory);
  const auto hashes = metadata(directory / "expected.safetensors");
  const auto expected = nlohmann::json::parse(hashes.at("sha256").get<std::string>());
  int checked = 0;
  for (const ExpertGroup& group : checkpoint.expert_groups())
    for (int expert = 0; expert < checkpoint.config().moe.experts; ++expert)
      for (const Projection projection : projections) {
        const std::string key = "layers." + std::to_string(group.layer) + ".experts." +
                                std::to_string(expert) + "." + std::string(name(projection));
        if (!expected.contains(key)) continue;
        const auto matrix = checkpoint.expert(group.layer, expert, projection);
        ASSERT_TRUE(matrix) << matrix.status().message();
        const std::vector<float> values = to_floats(*matrix);
        EXPECT_EQ(sha256({reinterpret_cast<const char*>(values.data()), values.size() * 4}), expected[key])
            << key;
        ++checked;
      }
  EXPECT_EQ(checked, static_cast<int>(expected.size()));
  EXPECT_GT(checked, 0);
}

class RealCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    if (folder() == nullptr) GTEST_SKIP() << "GATEFOLD_CHECKPOINTS names no folder of checkpoints";
  }
  static const char* folder() { return std::getenv("GATEFOLD_CHECKPOINTS"); }
  static fs::path path(const char* directory) { return fs::path(folder()) / directory; }
};

TEST_F(RealCheckpoint, Mixtral) {
  expect_weights(path("mixtral-bf16"));
  const Checkpoint checkpoint = open_good(path("mixtral-bf16"));
  EXPECT_TRUE(checkpoint.router(0));
  EXPECT_EQ(checkpoint.config().rope.theta, 1e6);
  // Cut: only what is asked for must exist.
  expect_error(checkpoint.tensor("lm_head.weight").status(), Code::bad_file, {"'lm_head.weight'"});
}

TEST_F(RealCheckpoint, Qwen2) {
  expect_weights(path("qwen2-moe-bf16"));
  const Checkpoint checkpoint = open_good(path("qwen2-moe-bf16"));
  EXPECT_EQ(checkpoint.config().moe.shared.intermediate, 96);
  for (const Projection projection : projections) EXPECT_TRUE(checkpoint.shared_expert(0, projection));
  EXPECT_TRUE(checkpoint.shared_expert_gate(0));
}

TEST_F(RealCheckpoint, DeepseekV3) {
  expect_weights(path("deepseek-v3-bf16"));
  const Checkpoint checkpoint = open_good(path("deepseek-v3-bf16"));
  EXPECT_EQ(checkpoint.config().is_moe, (std::vector<bool>{false, true}));
  EXPECT_EQ(checkpoint.config().moe.routing.groups, 4);
  for (const Projection projection : projections) EXPECT_TRUE(checkpoint.shared_expert(1, projection));
  const TensorEntry* bias = checkpoint.router_correction_bias(1);
  ASSERT_NE(bias, nullptr);
  EXPECT_EQ(bias->dtype, DType::f32);
}

// Those of other conventions open with the right values, or say which convention is missing.
TEST_F(RealCheckpoint, EveryDirectory) {
  int directories = 0;
  for (const auto& entry : fs::directory_iterator(folder())) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    SCOPED_TRACE(entry.path().string());
    ++directories;
    const auto checkpoint = Checkpoint::open(entry.path());
    if (checkpoint)
      expect_weights(entry.path());
    else
      expect_error(checkpoint.status(), Code::unsupported, {entry.path().string(), "config.json", "known: "});
  }
  EXPECT_GT(directories, 0);
}

}  // namespace
}  // namespace gatefold
