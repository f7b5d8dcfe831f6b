#pragma once
/// \file
/// Small checkpoints in the conventions of other software, written tensor by tensor from what is documented
/// of them, with the weights that they mean.

#include <algorithm>
#include <functional>
#include <map>
#include <random>

#include "checkpoint_files.h"
#include "gatefold/codec.h"

namespace gatefold {

/// A checkpoint directory in memory.
struct Files {
  nlohmann::json config;
  std::vector<FileTensor> tensors;
  std::map<std::string, nlohmann::json> side;         ///< files beside config.json
  std::map<std::string, std::vector<float>> weights;  ///< by "expert.projection": [n, k]
  std::map<std::string, std::vector<float>> biases;   ///< the same: [n]

  nlohmann::json& quantization() { return config["quantization_config"]; }
  /// The tensor whose name ends so.
  FileTensor& tensor(const std::string& suffix) {
    for (FileTensor& tensor : tensors)
      if (tensor.name.ends_with(suffix)) return tensor;
    throw std::runtime_error("no tensor " + suffix);
  }
  void drop(const std::string& suffix) {
    const std::string name = tensor(suffix).name;
    std::erase_if(tensors, [&](const FileTensor& tensor) { return tensor.name == name; });
  }
  void write(const std::filesystem::path& directory) const {
    save_file(directory / "config.json", config.dump(1));
    save_file(directory / "model.safetensors", safetensors(tensors));
    for (const auto& [name, content] : side) save_file(directory / name, content.dump(1));
  }
};

template <class T>
std::string bytes_of_values(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// Packs codes of `bits` bits into words without gaps, lowest first. Code i of sequence s is at(s, i); word w
/// of sequence s is out[w * step + s * stride].
inline std::vector<std::uint32_t> pack_words(
    int bits, std::int64_t sequences, std::int64_t count, std::int64_t step, std::int64_t stride,
    const std::function<std::uint32_t(std::int64_t, std::int64_t)>& at) {
  const std::int64_t words = (count * bits + 31) / 32;
  std::vector<std::uint32_t> out(static_cast<std::size_t>(words * sequences));
  for (std::int64_t s = 0; s < sequences; ++s)
    for (std::int64_t bit = 0; bit < count * bits; ++bit) {
      const std::uint32_t value = at(s, bit / bits) >> (bit % bits) & 1;
      out[static_cast<std::size_t>(bit / 32 * step + s * stride)] |= value << (bit % 32);
    }
  return out;
}

/// Fills in the tensors of one layer after another.
class ConventionWriter {
 public:
  explicit ConventionWriter(int hidden = 256, int intermediate = 128)
      : hidden_(hidden), intermediate_(intermediate) {
    files.config = {{"model_type", "qwen3_moe"},
                    {"hidden_size", hidden},
                    {"intermediate_size", intermediate},
                    {"moe_intermediate_size", intermediate},
                    {"num_hidden_layers", 1},
                    {"num_attention_heads", 4},
                    {"num_key_value_heads", 2},
                    {"head_dim", 16},
                    {"vocab_size", 64},
                    {"num_experts", kExperts},
                    {"num_experts_per_tok", 1},
                    {"max_position_embeddings", 64},
                    {"norm_topk_prob", true},
                    {"dtype", "bfloat16"}};
  }

  static constexpr int kExperts = 2;
  Files files;

  /// A matrix in integers: zero points and scales per group of columns.
  struct Integers {
    std::int64_t n, k, groups;
    int bits;
    bool symmetric;
    std::vector<std::uint32_t> codes, zeros;  ///< [n, k], [n, groups]
    std::vector<std::int32_t> group_of;       ///< [k]
    std::vector<std::uint16_t> scales;        ///< [n, groups], codes of `scale`
    std::vector<float> scale_values;
    std::uint32_t code(std::int64_t row, std::int64_t column) const {
      return codes[static_cast<std::size_t>(row * k + column)];
    }
    std::uint32_t zero(std::int64_t row, std::int64_t group) const {
      return zeros[static_cast<std::size_t>(row * groups + group)];
    }
    std::uint16_t scale(std::int64_t row, std::int64_t group) const {
      return scales[static_cast<std::size_t>(row * groups + group)];
    }
  };

  template <Format Scale>
  Integers integers(std::int64_t n, std::int64_t k, int bits, bool symmetric, std::int64_t group,
                    bool ordered) {
    Integers m{n, k, group == 0 ? 1 : (k + group - 1) / group, bits, symmetric, {}, {}, {}, {}, {}};
    const std::uint32_t middle = 1u << (bits - 1);
    for (std::int64_t i = 0; i < n * m.groups; ++i) {
      m.zeros.push_back(symmetric ? middle : middle - 1 + random(3));
      m.scales.push_back(
          static_cast<std::uint16_t>(encode<Scale>(0.001f + 0.0001f * static_cast<float>(random(90)))));
      m.scale_values.push_back(decode<Scale>(m.scales.back()));
    }
    for (std::int64_t i = 0; i < k; ++i)
      m.group_of.push_back(group == 0 ? 0 : static_cast<std::int32_t>(i / group));
    // Gate and up of an expert take their inputs in the same order.
    const bool like_the_last = static_cast<std::int64_t>(last_order_.size()) == k;
    if (ordered && !like_the_last) std::shuffle(m.group_of.begin(), m.group_of.end(), random_);
    if (ordered && like_the_last) m.group_of = last_order_;
    last_order_ = m.group_of;
    // Around the zero points, as weights are around 0.
    const auto half = static_cast<int>(middle);
    for (std::int64_t i = 0; i < n * k; ++i) {
      const std::uint32_t zero = m.zero(i / k, m.group_of[static_cast<std::size_t>(i % k)]);
      const int level = static_cast<int>(random(middle) + random(middle)) - (half - 1);
      m.codes.push_back(
          static_cast<std::uint32_t>(std::clamp(static_cast<int>(zero) + level, 0, 2 * half - 1)));
    }
    return m;
  }

  static std::vector<float> values(const Integers& m) {
    std::vector<float> weights;
    for (std::int64_t row = 0; row < m.n; ++row)
      for (std::int64_t i = 0; i < m.k; ++i) {
        const std::int64_t g = m.group_of[static_cast<std::size_t>(i)];
        const int level = static_cast<int>(m.code(row, i)) - static_cast<int>(m.zero(row, g));
        weights.push_back(static_cast<float>(level) *
                          m.scale_values[static_cast<std::size_t>(row * m.groups + g)]);
      }
    return weights;
  }

  /// Calls f(key, module, n, k) for every matrix of every expert.
  void for_each_matrix(const std::function<void(const std::string& key, const std::string& module,
                                                std::int64_t n, std::int64_t k)>& f) {
    const bool mixtral = block == "ffn" || block == "block_sparse_moe";
    for (int e = 0; e < kExperts; ++e)
      for (const std::string name : {"gate", "up", "down"}) {
        const bool down = name == "down";
        const std::string letter = name == "gate" ? "w1" : down ? "w2" : "w3";
        f(std::to_string(e) + "." + name,
          prefix + "layers.0." + block + ".experts." + std::to_string(e) + "." +
              (mixtral ? letter : name + "_proj"),
          down ? hidden_ : intermediate_, down ? intermediate_ : hidden_);
      }
  }
  std::string prefix = "model.", block = "mlp";

  void add(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape,
           std::string data) {
    files.tensors.push_back({name, dtype, std::move(shape), std::move(data)});
  }
  template <Format F>
  void add_wide(const std::string& name, std::vector<std::int64_t> shape, const std::vector<float>& values) {
    std::string data;
    for (const float value : values) {
      const std::uint32_t code = encode<F>(value);
      data.append(reinterpret_cast<const char*>(&code), F.bits / 8);
    }
    add(name,
        F == formats::bf16  ? "BF16"
        : F == formats::f16 ? "F16"
                            : "F32",
        std::move(shape), std::move(data));
  }

  void add_router(const std::string& name) {
    std::vector<float> weights;
    for (int i = 0; i < kExperts * hidden_; ++i)
      weights.push_back(0.01f * static_cast<float>(random(9)) - 0.04f);
    add_wide<formats::bf16>(prefix + "layers.0." + block + "." + name + ".weight", {kExperts, hidden_},
                            weights);
  }

  std::uint32_t random(std::uint32_t below) { return random_() % below; }
  std::string random_bytes(std::int64_t count, std::uint32_t first, std::uint32_t below) {
    std::string bytes;
    for (std::int64_t i = 0; i < count; ++i) bytes += static_cast<char>(first + random(below));
    return bytes;
  }
  /// Codes of e4m3 of moderate size, of both signs.
  std::string random_e4m3(std::int64_t count) {
    std::string bytes;
    for (std::int64_t i = 0; i < count; ++i)
      bytes += static_cast<char>(0x20 + random(0x40) + 128 * random(2));
    return bytes;
  }

  int hidden_, intermediate_;

 private:
  std::mt19937 random_{7};
  std::vector<std::int32_t> last_order_;
};

}  // namespace gatefold
