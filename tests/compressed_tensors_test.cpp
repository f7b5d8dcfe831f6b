#include "checkpoint/compressed_tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <random>

#include "checkpoint/json.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_writer.h"
#include "sha256.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view module = "model.layers.0.mlp.experts.1.up_proj";

std::vector<float> random_weights(std::int64_t n, std::int64_t k, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<float> weights(static_cast<std::size_t>(n * k));
  for (float& weight : weights) weight = normal(random);
  std::fill(weights.begin(), weights.begin() + k, 0.0f);  // a row of zeros
  return weights;
}

QuantizedMatrix make_quantized(SchemeId id, std::int64_t n, std::int64_t k) {
  const std::vector<float> weights = random_weights(n, k, 7);
  Result<QuantizedMatrix> matrix = quantize(id, {weights.data(), DType::f32, n, k});
  EXPECT_TRUE(matrix.ok()) << matrix.status().message();
  return std::move(*matrix);
}

/// A directory of one stored matrix, whose tensors a test may change before it is read.
class Stored {
 public:
  struct Tensor {
    std::string name;
    DType dtype;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> data;
  };

  explicit Stored(const QuantizedMatrix& matrix)
      : n(matrix.n),
        k(matrix.k),
        config(json::parse(
            compressed_tensors::config(scheme(matrix.scheme), {"lm_head"}, matrix.input_scale.has_value())
                .dump())) {
    const auto layout = compressed_tensors::layout(matrix);
    const auto data = compressed_tensors::store(matrix);
    EXPECT_TRUE(data.ok()) << data.status().message();
    EXPECT_EQ(layout.size(), data->size());
    for (std::size_t i = 0; i < layout.size(); ++i)
      tensors.push_back({std::string(module) + std::string(layout[i].suffix), layout[i].dtype,
                         layout[i].shape, (*data)[i]});
  }
  Stored(const Stored&) = delete;
  ~Stored() { fs::remove_all(directory_); }

  Tensor& at(std::string_view suffix) {
    for (Tensor& tensor : tensors)
      if (tensor.name == std::string(module) + std::string(suffix)) return tensor;
    ADD_FAILURE() << "no " << suffix;
    return tensors.front();
  }
  void erase(std::string_view suffix) {
    std::erase_if(tensors,
                  [&](const Tensor& t) { return t.name == std::string(module) + std::string(suffix); });
  }
  void add(std::string_view suffix, DType dtype, std::vector<std::int64_t> shape,
           std::vector<std::byte> data) {
    tensors.push_back({std::string(module) + std::string(suffix), dtype, std::move(shape), std::move(data)});
  }
  json& weights() { return config["config_groups"]["group_0"]["weights"]; }
  json& input() { return config["config_groups"]["group_0"]["input_activations"]; }

  /// What the convention makes of it. scheme() must agree with read(), but for what only the data shows.
  Result<QuantizedMatrix> read() {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
    std::vector<PlannedTensor> plan;
    for (const Tensor& tensor : tensors) plan.push_back({tensor.name, tensor.dtype, tensor.shape});
    Result<SafetensorsWriter> writer = SafetensorsWriter::create(directory_, plan, 1 << 30);
    if (!writer.ok()) return writer.status();
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (Status status = writer->write(i, tensors[i].data); !status.ok()) return status;
    if (Status status = writer->finish(); !status.ok()) return status;

    const Result<Source> source = Source::open(directory_);
    if (!source.ok()) return source.status();
    const ModelConfig model;
    EXPECT_TRUE(compressed_tensors::convention.recognises(config));
    const auto reader = compressed_tensors::convention.open(*source, config, model, "config.json");
    if (!reader.ok()) return reader.status();
    const Linear linear{std::string(module), n, k, {}};
    const Result<SchemeId> scheme = (*reader)->scheme(linear);
    Result<ExpertMatrix> matrix = (*reader)->read(linear);
    if (!matrix.ok()) {
      EXPECT_TRUE(scheme.ok() || scheme.status().message() == matrix.status().message());
      return matrix.status();
    }
    EXPECT_TRUE(scheme.ok());
    if (!std::holds_alternative<QuantizedMatrix>(*matrix)) return Status(Code::internal, "a view");
    return std::get<QuantizedMatrix>(std::move(*matrix));
  }

  /// The error that reading gives; it must hold all `words`.
  void expect_error(std::initializer_list<std::string_view> words, Code code = Code::bad_file) {
    const Result<QuantizedMatrix> matrix = read();
    ASSERT_FALSE(matrix.ok());
    EXPECT_EQ(matrix.status().code(), code) << matrix.status().message();
    for (const std::string_view word : words)
      EXPECT_NE(matrix.status().message().find(word), std::string::npos)
          << word << " in: " << matrix.status().message();
  }

  std::int64_t n, k;
  json config;
  std::vector<Tensor> tensors;

 private:
  const fs::path directory_ =
      fs::path(testing::TempDir()) /
      ("ct-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
};

void expect_equal(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  EXPECT_EQ(a.scheme, b.scheme) << scheme(a.scheme).name;
  EXPECT_EQ(a.n, b.n);
  EXPECT_EQ(a.k, b.k);
  EXPECT_EQ(a.scale_format, b.scale_format);
  EXPECT_EQ(a.values, b.values);
  EXPECT_EQ(a.scales, b.scales);
  EXPECT_EQ(a.zero_points, b.zero_points);
  EXPECT_EQ(a.tensor_scale.value, b.tensor_scale.value);
  if (scheme(a.scheme).weight.tensor_scale.stored()) {
    EXPECT_EQ(a.tensor_scale.divides, b.tensor_scale.divides);
  }
  ASSERT_EQ(a.input_scale.has_value(), b.input_scale.has_value());
  if (!a.input_scale) return;
  EXPECT_EQ(a.input_scale->value, b.input_scale->value);
  EXPECT_EQ(a.input_scale->divides, b.input_scale->divides);
}

TEST(CompressedTensors, EverySchemeComesBackAsItWas) {
  int tried = 0;
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    if (!scheme(id).weight.quantized()) continue;
    for (const auto& [n, k] : {std::pair{1, 128}, {3, 256}, {130, 384}, {17, 96}, {5, 33}, {129, 200}}) {
      if (!check_shape(id, n, k).ok()) continue;
      SCOPED_TRACE(std::string(scheme(id).name) + " " + std::to_string(n) + " x " + std::to_string(k));
      const QuantizedMatrix matrix = make_quantized(id, n, k);
      const Result<QuantizedMatrix> read = Stored(matrix).read();
      ASSERT_TRUE(read.ok()) << read.status().message();
      expect_equal(*read, matrix);
      ++tried;
    }
  }
  EXPECT_GT(tried, 60);
}

TEST(CompressedTensors, StaticInputScalesAndOtherScaleTypesComeBack) {
  QuantizedMatrix fp8 = make_quantized(SchemeId::fp8_tensor_afp8, 4, 64);
  fp8.input_scale = TensorScale{0.375f, false};
  const Result<QuantizedMatrix> read = Stored(fp8).read();
  ASSERT_TRUE(read.ok()) << read.status().message();
  expect_equal(*read, fp8);

  QuantizedMatrix nvfp4 = make_quantized(SchemeId::nvfp4_anvfp4, 4, 64);
  nvfp4.input_scale = TensorScale{97.0f, true};
  const Result<QuantizedMatrix> block = Stored(nvfp4).read();
  ASSERT_TRUE(block.ok()) << block.status().message();
  expect_equal(*block, nvfp4);
  nvfp4.input_scale->divides = false;
  EXPECT_EQ(compressed_tensors::store(nvfp4).status().code(), Code::unsupported);

  QuantizedMatrix half = make_quantized(SchemeId::int8, 4, 64);
  half.scale_format = formats::f16;
  half.scales.resize(8);
  const Result<QuantizedMatrix> f16 = Stored(half).read();
  ASSERT_TRUE(f16.ok()) << f16.status().message();
  expect_equal(*f16, half);
}

// What the package's own helpers make of the codes -8, 5, -3, 0, 7, 1 (pack_to_int32).
TEST(CompressedTensors, WordsAreOffsetBinaryLowestBitsFirst) {
  QuantizedMatrix matrix = make_quantized(SchemeId::int4_channel, 1, 6);
  matrix.values = {std::byte{0x58}, std::byte{0x0d}, std::byte{0x17}};
  const auto data = compressed_tensors::store(matrix);
  ASSERT_TRUE(data.ok());
  const std::vector<std::byte> word{std::byte{0xd0}, std::byte{0x85}, std::byte{0x9f}, std::byte{0x00}};
  EXPECT_EQ((*data)[0], word);
}

TEST(CompressedTensors, ZeroPointsArePackedDownTheColumns) {
  QuantizedMatrix matrix = make_quantized(SchemeId::uint4_g32, 9, 64);
  for (int row = 0; row < 9; ++row)
    matrix.zero_points[static_cast<std::size_t>(row)] = static_cast<std::byte>(row + 1 + (15 - row) * 16);
  Stored stored(matrix);
  const Stored::Tensor& zeros = stored.at(".weight_zero_point");
  EXPECT_EQ(zeros.shape, (std::vector<std::int64_t>{2, 2}));
  std::uint32_t words[4];
  std::memcpy(words, zeros.data.data(), sizeof words);
  EXPECT_EQ(words[0], 0x87654321u);
  EXPECT_EQ(words[1], 0x89abcdefu);
  EXPECT_EQ(words[2], 0x9u);
  EXPECT_EQ(words[3], 0x7u);
}

TEST(CompressedTensors, ConfigsSayWhatThePackagesExpect) {
  const auto group = [](SchemeId id) {
    return compressed_tensors::config(scheme(id), {})["config_groups"]["group_0"];
  };
  EXPECT_EQ(group(SchemeId::int4_g128)["format"], "pack-quantized");
  EXPECT_EQ(
      json::parse(group(SchemeId::int4_g128)["weights"].dump()),
      json::parse(
          R"({"num_bits":4,"type":"int","symmetric":true,"strategy":"group","group_size":128,"dynamic":false})"));
  EXPECT_TRUE(group(SchemeId::int4_g128)["input_activations"].is_null());
  EXPECT_EQ(group(SchemeId::int8)["format"], "pack-quantized");
  EXPECT_EQ(group(SchemeId::int8_aint8)["format"], "int-quantized");
  EXPECT_EQ(group(SchemeId::int8_aint8)["input_activations"]["strategy"], "token");
  EXPECT_EQ(group(SchemeId::fp8_block_afp8)["format"], "float-quantized");
  EXPECT_EQ(group(SchemeId::fp8_block_afp8)["weights"]["block_structure"].dump(), "[128,128]");
  EXPECT_EQ(group(SchemeId::fp8_block_afp8)["input_activations"]["group_size"], 128);
  EXPECT_EQ(group(SchemeId::uint4_g64)["weights"]["symmetric"], false);
  EXPECT_EQ(group(SchemeId::mxfp4)["format"], "mxfp4-pack-quantized");
  EXPECT_EQ(group(SchemeId::mxfp4)["weights"]["scale_dtype"], "torch.uint8");
  EXPECT_EQ(group(SchemeId::mxfp8_amxfp8)["format"], "mxfp8-quantized");
  EXPECT_EQ(group(SchemeId::nvfp4)["format"], "nvfp4-pack-quantized");
  EXPECT_EQ(group(SchemeId::nvfp4)["weights"]["strategy"], "tensor_group");
  EXPECT_EQ(group(SchemeId::nvfp4_anvfp4)["input_activations"]["dynamic"], true);
  EXPECT_EQ(compressed_tensors::config(scheme(SchemeId::nvfp4), {})["quant_method"], "compressed-tensors");
  EXPECT_EQ(group(SchemeId::fp8_e5m2)["weights"]["element"], "e5m2");
  EXPECT_FALSE(group(SchemeId::fp8_channel)["weights"].contains("element"));
  EXPECT_TRUE(compressed_tensors::needs_extension(scheme(SchemeId::fp8_e5m2)));
  for (const Scheme& row : all_schemes())
    if (row.weight.quantized()) {
      const std::string said = compressed_tensors::config(row, {}).dump();
      EXPECT_EQ(compressed_tensors::needs_extension(row), said.find("element") != std::string::npos)
          << row.name;
    }
}

// Config and operands say the same, in both directions, for what is in the table and for what is not yet.
TEST(CompressedTensors, EveryOperandSurvivesItsConfig) {
  std::vector<Scheme> rows(all_schemes().begin(), all_schemes().end());
  using namespace operands;
  rows.push_back({"int8_g48", scaled(int8, f32, per_group(48)), act16});
  rows.push_back(
      {"fp8_block64_afp8", scaled(e4m3, f32, per_block(64, 64)), scaled(e4m3, f32, per_group(64))});
  rows.push_back({"int8_tensor_ae5m2", scaled(int8, f32, per_tensor), scaled(e5m2, f32, per_channel)});
  for (const Scheme& row : rows) {
    if (!row.weight.quantized()) continue;
    const json config = json::parse(compressed_tensors::config(row, {}).dump());
    const auto groups = compressed_tensors::parse_groups(config, "config.json");
    ASSERT_TRUE(groups.ok()) << groups.status().message();
    ASSERT_EQ(groups->size(), 1u);
    const compressed_tensors::Group& group = groups->front();
    EXPECT_TRUE(group.unsupported.ok()) << row.name << ": " << group.unsupported.message();
    Operand weight = row.weight;
    if (compressed_tensors::is_wide(weight.scale)) weight.scale = f32;
    EXPECT_EQ(group.weight, weight) << row.name;
    EXPECT_EQ(group.activation, row.activation) << row.name;
    const Result<SchemeId> found = compressed_tensors::find_row(group, {});
    const auto id = find_scheme(row.name);
    EXPECT_EQ(found.ok(), id.has_value()) << row.name;
    if (id) {
      EXPECT_EQ(*found, *id);
    }
  }
}

TEST(CompressedTensors, OlderWritersAreUnderstood) {
  Stored mx(make_quantized(SchemeId::mxfp4, 4, 64));
  mx.weights().erase("scale_dtype");
  mx.weights().erase("strategy");
  mx.at(".weight_scale").dtype = DType::f8_e8m0;
  EXPECT_TRUE(mx.read().ok());

  Stored block(make_quantized(SchemeId::fp8_block, 130, 130));
  block.weights()["block_structure"] = "128x128";
  EXPECT_TRUE(block.read().ok());

  Stored tensor(make_quantized(SchemeId::fp8_tensor, 4, 64));
  tensor.at(".weight_scale").shape = {};
  EXPECT_TRUE(tensor.read().ok());

  Stored shape(make_quantized(SchemeId::int4_g64, 4, 64));
  shape.at(".weight_shape").dtype = DType::i32;
  shape.at(".weight_shape").data = {std::byte{4}, {}, {}, {}, std::byte{64}, {}, {}, {}};
  EXPECT_TRUE(shape.read().ok());
}

// llm-compressor writes 4-bit weights with quantized activations as one code per byte.
TEST(CompressedTensors, UnpackedFourBitCodes) {
  const QuantizedMatrix matrix = make_quantized(SchemeId::int4_g128_aint8, 4, 128);
  Stored stored(matrix);
  std::vector<std::byte> codes;
  for (const std::byte pair : matrix.values)
    for (const int shift : {0, 4}) {
      const int code = std::to_integer<int>(pair) >> shift & 15;
      codes.push_back(static_cast<std::byte>(code < 8 ? code : code - 16));
    }
  stored.erase(".weight_packed");
  stored.erase(".weight_shape");
  stored.config["config_groups"]["group_0"]["format"] = "int-quantized";
  stored.add(".weight", DType::i8, {4, 128}, codes);
  const Result<QuantizedMatrix> read = stored.read();
  ASSERT_TRUE(read.ok()) << read.status().message();
  expect_equal(*read, matrix);
  stored.at(".weight").data[130] = std::byte{8};
  stored.expect_error({"up_proj.weight", "8 at 130", "4-bit"});
}

TEST(CompressedTensors, ConfigAndTensorsMustAgree) {
  const QuantizedMatrix int4 = make_quantized(SchemeId::int4_g64, 4, 128);
  const auto with = [&](const auto& change, std::initializer_list<std::string_view> words,
                        Code code = Code::bad_file) {
    Stored stored(int4);
    change(stored);
    stored.expect_error(words, code);
  };
  with([](Stored& s) { s.erase(".weight_scale"); }, {"up_proj.weight_scale", "config_groups.group_0"});
  with([](Stored& s) { s.erase(".weight_packed"); }, {"up_proj.weight"});
  with([](Stored& s) { s.erase(".weight_shape"); }, {"up_proj.weight_shape"});
  with([](Stored& s) { s.at(".weight_scale").shape = {2, 4}; }, {"up_proj.weight_scale", "[2, 4]", "[4, 2]"});
  with([](Stored& s) { s.at(".weight_scale").dtype = DType::i16; }, {"up_proj.weight_scale", "I16", "BF16"});
  with([](Stored& s) { s.at(".weight_packed").dtype = DType::f32; }, {"up_proj.weight_packed", "F32", "I32"});
  with([](Stored& s) { s.at(".weight_shape").data[0] = std::byte{9}; },
       {"up_proj.weight_shape", "[9, 128]", "[4, 128]"});
  with([](Stored& s) { s.weights()["group_size"] = 32; }, {"up_proj.weight_scale", "[4, 4]"});
  with([](Stored& s) { s.weights()["group_size"] = 96; }, {"up_proj", "128", "group_size 96"});
  with([](Stored& s) { s.weights()["symmetric"] = false; }, {"up_proj.weight_zero_point"});
  with([](Stored& s) { s.weights()["num_bits"] = 3; }, {"up_proj.weight_packed", "[4, 12]"});
  with(
      [](Stored& s) {
        s.add(".weight_zero_point", DType::i32, {1, 2}, std::vector<std::byte>(8));
      },
      {"up_proj.weight_zero_point", "symmetric"});
  with([](Stored& s) { s.add(".weight_global_scale", DType::f32, {1}, std::vector<std::byte>(4)); },
       {"up_proj.weight_global_scale", "tensor_group"});
  with([](Stored& s) { s.add(".input_scale", DType::f32, {1}, std::vector<std::byte>(4)); },
       {"up_proj.input_scale"});
  with([](Stored& s) { s.add(".weight_g_idx", DType::i32, {128}, std::vector<std::byte>(512)); },
       {"up_proj.weight_g_idx", "actorder"});
  with(
      [](Stored& s) {
        s.add(".weight", DType::i8, {4, 128}, std::vector<std::byte>(512));
      },
      {"up_proj.weight", "too"});
  with([](Stored& s) { s.config["ignore"] = {"re:.*up_proj"}; }, {"up_proj.weight_packed", "ignore"});
  with([](Stored& s) { s.config["config_groups"]["group_0"]["targets"] = {"re:.*gate_proj$"}; },
       {"up_proj.weight_packed", "target"});
}

TEST(CompressedTensors, TheClosestTargetWins) {
  Stored stored(make_quantized(SchemeId::int4_g64, 4, 128));
  const json good = stored.config["config_groups"]["group_0"];
  json bad = good;
  bad["weights"]["group_size"] = 32;
  for (const auto& [close, far] : {std::pair<std::string, std::string>{std::string(module), "re:.*"},
                                   {std::string(module), "Linear"},
                                   {"re:.*experts\\.\\d+\\.(gate|up|down)_proj$", "Linear"}}) {
    stored.config["config_groups"] = {{"a", bad}, {"b", good}, {"c", bad}};
    stored.config["config_groups"]["a"]["targets"] = {far};
    stored.config["config_groups"]["b"]["targets"] = {close};
    stored.config["config_groups"]["c"]["targets"] = {"Embedding"};
    const Result<QuantizedMatrix> read = stored.read();
    EXPECT_TRUE(read.ok()) << close << ": " << read.status().message();
  }
}

TEST(CompressedTensors, BadValuesInTheData) {
  Stored nvfp4(make_quantized(SchemeId::nvfp4, 4, 64));
  const float values[] = {std::numeric_limits<float>::quiet_NaN(), 0.0f, -1.0f,
                          std::numeric_limits<float>::infinity()};
  for (const float value : values) {
    std::memcpy(nvfp4.at(".weight_global_scale").data.data(), &value, 4);
    nvfp4.expect_error({"up_proj.weight_global_scale", "positive"});
  }
  Stored negative(make_quantized(SchemeId::nvfp4, 4, 64));
  negative.at(".weight_scale").data[5] = std::byte{0xb8};
  negative.expect_error({"up_proj.weight_scale", "scale 5", "negative"});
}

TEST(CompressedTensors, BadConfigs) {
  const auto with = [&](std::string_view change, std::string_view word, Code code = Code::bad_file) {
    Stored stored(make_quantized(SchemeId::int4_g64, 4, 128));
    stored.config.merge_patch(json::parse(change));
    SCOPED_TRACE(change);
    stored.expect_error({"config.json", word}, code);
  };
  const auto weights = [&](const std::string& change, std::string_view word, Code code = Code::bad_file) {
    with(R"({"config_groups":{"group_0":{"weights":)" + change + "}}}", word, code);
  };
  weights(R"({"num_bits":"4"})", "num_bits");
  weights(R"({"num_bits":1e99})", "num_bits");
  weights(R"({"num_bits":-4})", "num_bits");
  weights(R"({"num_bits":18446744073709551615})", "num_bits");
  weights(R"({"num_bits":300})", "300", Code::unsupported);
  weights(R"({"group_size":0})", "group_size");
  weights(R"({"group_size":65536})", "group_size");
  weights(R"({"group_size":null})", "group_size");
  weights(R"({"type":"complex"})", "type");
  weights(R"({"type":7})", "type");
  weights(R"({"symmetric":"yes"})", "symmetric");
  weights(R"({"strategy":"attn_head"})", "strategy", Code::unsupported);
  weights(R"({"strategy":"block"})", "block_structure");
  weights(R"({"strategy":"block","block_structure":"128"})", "block_structure");
  weights(R"({"strategy":"block","block_structure":[128]})", "block_structure");
  weights(R"({"scale_dtype":"torch.complex64"})", "scale_dtype", Code::unsupported);
  weights("7", "weights");
  weights("null", "weights", Code::unsupported);
  with(R"({"config_groups":{"group_0":{"targets":"Linear"}}})", "targets");
  with(R"({"config_groups":{"group_0":{"targets":[3]}}})", "targets");
  with(R"({"config_groups":{"group_0":{"targets":["re:(a"]}}})", "pattern", Code::unsupported);
  json many = json::array();
  for (int i = 0; i < 100; ++i) many.push_back("re:a{99}");
  with(json{{"ignore", many}}.dump(), "states", Code::unsupported);
  with(R"({"config_groups":{"group_0":["Linear"]}})", "group_0");
  with(R"({"config_groups":[]})", "config_groups");
  with(R"({"config_groups":{"group_0":{"input_activations":{"dynamic":"sometimes"}}}})", "dynamic");
  with(R"({"config_groups":{"group_0":{"output_activations":{"num_bits":8}}}})", "output_activations",
       Code::unsupported);
  with(R"({"ignore":{"a":1}})", "ignore");
  with(R"({"ignore":[["a"]]})", "ignore");
  with(R"({"format":4})", "format");
  with(R"({"transform_config":{"config_groups":{}}})", "transform_config", Code::unsupported);
}

TEST(CompressedTensors, WithoutCompanionsALayerIsUnquantized) {
  Stored stored(make_quantized(SchemeId::int4_g64, 4, 128));
  stored.tensors.clear();
  stored.add(".weight", DType::bf16, {4, 128}, std::vector<std::byte>(1024));
  EXPECT_EQ(stored.read().status().message(), "a view");
  stored.at(".weight").dtype = DType::i16;
  stored.expect_error({"up_proj.weight", "I16"});
}

/// Metadata of expected.safetensors: the SHA-256 of every dequantized weight, as other software computed it.
std::map<std::string, std::string> expected_hashes(const fs::path& path) {
  const Result<MappedFile> file = MappedFile::open(path);
  EXPECT_TRUE(file.ok());
  const auto header = parse_safetensors_header(file->bytes(), file->bytes().size(), path.string());
  EXPECT_TRUE(header.ok());
  std::map<std::string, std::string> hashes;
  const json listed = json::parse(header->metadata.at("sha256"));
  for (const auto& [key, hash] : listed.items()) hashes[key] = hash.get<std::string>();
  return hashes;
}

TEST(CompressedTensors, RealFilesGiveTheWeightsThatOthersSee) {
  const char* root = std::getenv("GATEFOLD_CHECKPOINTS");
  if (root == nullptr) GTEST_SKIP() << "GATEFOLD_CHECKPOINTS is not set";
  int directories = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
    if (!entry.path().filename().string().starts_with("ct-")) continue;
    SCOPED_TRACE(entry.path().string());
    const Result<Checkpoint> checkpoint = Checkpoint::open(entry.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    EXPECT_EQ(checkpoint->convention(), "compressed-tensors");
    ASSERT_TRUE(checkpoint->stored_scheme().ok()) << checkpoint->stored_scheme().status().message();
    const auto hashes = expected_hashes(entry.path() / "expected.safetensors");
    EXPECT_GE(hashes.size(), 6u);
    for (const auto& [key, hash] : hashes) {
      int layer = -1, expert = -1;
      char what[8] = {};
      ASSERT_EQ(std::sscanf(key.c_str(), "layers.%d.experts.%d.%7s", &layer, &expert, what), 3) << key;
      for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
        if (name(projection) != what) continue;
        const Result<ExpertMatrix> matrix = checkpoint->expert(layer, expert, projection);
        ASSERT_TRUE(matrix.ok()) << matrix.status().message();
        const QuantizedMatrix& quantized = std::get<QuantizedMatrix>(*matrix);
        std::vector<float> weights(static_cast<std::size_t>(quantized.n * quantized.k));
        dequantize(quantized, weights.data());
        for (float& weight : weights) weight += 0.0f;  // the hashes are of weights without -0
        EXPECT_EQ(sha256(std::as_bytes(std::span(weights))), hash) << key;
      }
    }
    ++directories;
  }
  EXPECT_GE(directories, 14);
}

}  // namespace
}  // namespace gatefold
