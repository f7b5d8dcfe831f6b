#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "gatefold/decoder.h"
#include "model_files.h"

namespace gatefold {
namespace {

void expect_error(const Status& status, Code code, std::initializer_list<const char*> parts) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const char* part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in: " << status.message();
}

class Eval : public testing::Test {
 protected:
  static const Decoder& decoder() {
    static const Decoder decoder = load_decoder(tiny_moe);
    return decoder;
  }
  static std::vector<std::int32_t> text(std::size_t bytes) {
    return *text_tokens(decoder(), read_file(tiny_moe + "/valid.txt").substr(0, bytes));
  }
};

// metrics.json, valid_bits_per_byte: the same windows, transformers in f32.
TEST_F(Eval, LossOfTinyMoe) {
  constexpr double expected = 1.2201120166288928;
  std::int64_t last = 0;
  const auto result =
      evaluate(decoder(), text(65536), {.window = 512, .progress = [&](auto done, auto total) {
                                          EXPECT_GT(done, last);
                                          EXPECT_EQ(total, 65536);
                                          last = done;
                                        }});
  ASSERT_TRUE(result) << result.status().message();
  EXPECT_EQ(last, 65536);
  ASSERT_TRUE(result->bits_per_byte);
  EXPECT_NEAR(*result->bits_per_byte, expected, 0.0005);
  EXPECT_EQ(result->tokens, 128 * 511);
  EXPECT_DOUBLE_EQ(result->nats_per_token, *result->bits_per_byte * std::numbers::ln2);
  EXPECT_DOUBLE_EQ(result->perplexity, std::exp(result->nats_per_token));
  EXPECT_GT(result->seconds, 0);
}

TEST_F(Eval, EqualsTheLossOfTheLogits) {
  const auto tokens = text(70);  // three windows of 20; ten bytes remain
  double total = 0;
  for (int w = 0; w < 3; ++w) {
    Sequence sequence = decoder().new_sequence();
    std::vector<float> logits(20 * 256);
    ASSERT_TRUE(decoder().forward(std::span(tokens).subspan(w * 20, 20), sequence, logits).ok());
    for (int t = 0; t < 19; ++t) {
      double sum = 0;
      for (int i = 0; i < 256; ++i) sum += std::exp(static_cast<double>(logits[t * 256 + i]));
      total += std::log(sum) - logits[t * 256 + tokens[w * 20 + t + 1]];
    }
  }
  const auto result = evaluate(decoder(), tokens, {.window = 20});
  ASSERT_TRUE(result) << result.status().message();
  EXPECT_EQ(result->tokens, 57);
  EXPECT_NEAR(result->nats_per_token, total / 57, 1e-9);
}

// Quantizing on load, and quantizing to a file that is then loaded: the same bits, for every scheme.
TEST_F(Eval, OnLoadEqualsConverted) {
  const auto tokens = text(256);
  for_each_scheme([&]<class Tag>() {
    SCOPED_TRACE(Tag::scheme.name);
    if (!Tag::scheme.weight.quantized()) return;
    const TemporaryDirectory directory;
    ConvertOptions options;
    options.scheme = Tag::id;
    const auto report = convert(open_checkpoint(tiny_moe), directory / "converted", options);
    ASSERT_TRUE(report) << report.status().message();
    const Decoder stored = load_decoder((directory / "converted").string());
    EXPECT_EQ(stored.scheme(), Tag::id);
    const auto from_file = evaluate(stored, tokens, {.window = 128});
    const auto on_load = evaluate(load_decoder(tiny_moe, {.scheme = Tag::id}), tokens, {.window = 128});
    ASSERT_TRUE(from_file && on_load);
    EXPECT_EQ(from_file->nats_per_token, on_load->nats_per_token);
  });
}

TEST_F(Eval, SameBitsForEveryThreadCount) {
  const auto tokens = text(1024);
  const auto one = evaluate(load_decoder(tiny_moe, {.threads = 1}), tokens, {});
  const auto three = evaluate(load_decoder(tiny_moe, {.threads = 3}), tokens, {});
  ASSERT_TRUE(one && three);
  EXPECT_EQ(one->nats_per_token, three->nats_per_token);
}

TEST_F(Eval, RefusesBadWindows) {
  const auto status = [&](std::size_t bytes, int window) {
    return evaluate(decoder(), text(bytes), {.window = window}).status();
  };
  expect_error(status(100, 1), Code::invalid_argument, {"window = 1"});
  expect_error(status(100, -7), Code::invalid_argument, {"window = -7"});
  expect_error(status(100, 101), Code::invalid_argument, {"100 tokens", "101"});
  expect_error(status(0, 2), Code::invalid_argument, {"0 tokens"});
}

TEST_F(Eval, BitsPerByteOnlyForBytes) {
  const Decoder other = load_decoder(golden_models + "/mixtral-sliding-llama3");
  const std::vector<std::int32_t> tokens(64, 3);
  const auto result = evaluate(other, tokens, {.window = 32});
  ASSERT_TRUE(result) << result.status().message();
  EXPECT_FALSE(result->bits_per_byte);
  EXPECT_GT(result->perplexity, 1);
  expect_error(text_tokens(other, "text").status(), Code::invalid_argument, {"mixtral", "64", "--tokens"});
}

TEST_F(Eval, GreedyIsTheMostLikelyToken) {
  const auto prompt = text(40);
  std::vector<std::int32_t> streamed;
  GenerateOptions options{.tokens = 12};
  options.on_token = [&](std::int32_t token) {
    streamed.push_back(token);
    return true;
  };
  const auto result = generate(decoder(), prompt, options);
  ASSERT_TRUE(result) << result.status().message();
  ASSERT_EQ(result->tokens.size(), 12u);
  EXPECT_EQ(streamed, result->tokens);
  // Once more, from scratch for every token.
  std::vector<std::int32_t> all = prompt;
  for (const std::int32_t token : result->tokens) {
    Sequence sequence = decoder().new_sequence();
    std::vector<float> logits(256);
    ASSERT_TRUE(decoder().forward(all, sequence, logits).ok());
    EXPECT_EQ(token, std::max_element(logits.begin(), logits.end()) - logits.begin());
    all.push_back(token);
  }
}

TEST_F(Eval, SamplingFollowsTheSeed) {
  const auto prompt = text(40);
  const auto sample = [&](double temperature, std::uint64_t seed) {
    const auto result = generate(decoder(), prompt, {.tokens = 40, .temperature = temperature, .seed = seed});
    EXPECT_TRUE(result) << result.status().message();
    return result->tokens;
  };
  EXPECT_EQ(sample(1.0, 1), sample(1.0, 1));
  EXPECT_NE(sample(1.0, 1), sample(1.0, 2));
  // Almost greedy.
  EXPECT_EQ(sample(1e-6, 1), sample(0, 7));
}

// How often a token is drawn is its probability: 400 draws of one token against the model's own distribution.
TEST_F(Eval, SamplingMatchesTheDistribution) {
  const auto prompt = text(4);
  Sequence sequence = decoder().new_sequence();
  std::vector<float> logits(256);
  ASSERT_TRUE(decoder().forward(prompt, sequence, logits).ok());
  constexpr double temperature = 2.0;
  std::vector<double> probability(256);
  double total = 0;
  for (int i = 0; i < 256; ++i) total += probability[i] = std::exp(logits[i] / temperature);
  constexpr int draws = 400;
  std::vector<int> counts(256);
  for (int seed = 0; seed < draws; ++seed) {
    const auto result =
        generate(decoder(), prompt,
                 {.tokens = 1, .temperature = temperature, .seed = static_cast<std::uint64_t>(seed)});
    ASSERT_TRUE(result);
    ++counts[result->tokens[0]];
  }
  for (int i = 0; i < 256; ++i) {
    const double p = probability[i] / total;
    EXPECT_NEAR(counts[i], draws * p, 5 * std::sqrt(draws * p * (1 - p)) + 1) << i;
  }
}

TEST_F(Eval, GenerateStopsAndRefuses) {
  const auto prompt = text(8);
  const auto none = generate(decoder(), prompt, {.tokens = 0});
  ASSERT_TRUE(none);
  EXPECT_TRUE(none->tokens.empty());
  const auto stopped =
      generate(decoder(), prompt, {.tokens = 10, .on_token = [](std::int32_t) { return false; }});
  ASSERT_TRUE(stopped);
  EXPECT_EQ(stopped->tokens.size(), 1u);

  expect_error(generate(decoder(), {}, {}).status(), Code::invalid_argument, {"prompt is empty"});
  expect_error(generate(decoder(), prompt, {.tokens = -1}).status(), Code::invalid_argument, {"-1"});
  expect_error(generate(decoder(), prompt, {.temperature = -0.5}).status(), Code::invalid_argument, {"-0.5"});
  expect_error(
      generate(decoder(), prompt, {.temperature = std::numeric_limits<double>::quiet_NaN()}).status(),
      Code::invalid_argument, {"temperature"});
  expect_error(generate(decoder(), std::vector<std::int32_t>{300}, {}).status(), Code::invalid_argument,
               {"token 0 is 300"});
}

TEST_F(Eval, CompareSchemes) {
  const Checkpoint checkpoint = open_checkpoint(tiny_moe);
  const auto tokens = text(2048);
  CompareOptions options;
  options.schemes = {SchemeId::int4_g128, SchemeId::bf16, SchemeId::int8};
  options.window = 256;
  std::vector<SchemeId> seen;
  options.on_row = [&](const CompareRow& row) { seen.push_back(row.scheme); };
  const auto rows = compare(checkpoint, tokens, options);
  ASSERT_TRUE(rows) << rows.status().message();
  ASSERT_EQ(rows->size(), 3u);
  EXPECT_EQ(seen, options.schemes);
  const CompareRow &int4 = (*rows)[0], &bf16 = (*rows)[1], &int8 = (*rows)[2];
  for (const CompareRow& row : *rows) {
    ASSERT_TRUE(row.status.ok()) << row.status.message();
    EXPECT_GT(row.tokens_per_second, 0);
    // On its own, a scheme gives the same loss.
    const auto alone = evaluate(load_decoder(tiny_moe, {.scheme = row.scheme}), tokens, {.window = 256});
    EXPECT_EQ(alone->nats_per_token, row.loss.nats_per_token);
  }
  EXPECT_EQ(bf16.kl, 0);
  EXPECT_EQ(bf16.top1_agreement, 1);
  EXPECT_GE(bf16.bits_per_weight, 16);
  EXPECT_GE(int4.bits_per_weight, 4.125);
  EXPECT_LT(int4.bits_per_weight, 6);
  EXPECT_LT(int4.expert_bytes, int8.expert_bytes);
  EXPECT_GT(int4.kl, int8.kl);
  EXPECT_GT(int8.kl, 0);
  EXPECT_LT(int8.kl, 0.001);
  EXPECT_LT(int4.top1_agreement, int8.top1_agreement);
  EXPECT_GT(int8.top1_agreement, 0.98);

  // Logits in a file: the same numbers.
  options.memory_bytes = 0;
  options.schemes = {SchemeId::int4_g128};
  const auto from_file = compare(checkpoint, tokens, options);
  ASSERT_TRUE(from_file) << from_file.status().message();
  EXPECT_EQ((*from_file)[0].kl, int4.kl);
  EXPECT_EQ((*from_file)[0].top1_agreement, int4.top1_agreement);
}

// KL against a direct sum over the softmax of both models' logits.
TEST_F(Eval, CompareDivergence) {
  const auto tokens = text(32);
  CompareOptions options;
  options.schemes = {SchemeId::int4_channel};
  options.window = 32;
  const auto rows = compare(open_checkpoint(tiny_moe), tokens, options);
  ASSERT_TRUE(rows) << rows.status().message();
  std::vector<float> logits[2];
  for (int i = 0; i < 2; ++i) {
    DecoderOptions decoder_options;
    if (i == 1) decoder_options.scheme = SchemeId::int4_channel;
    const Decoder model = load_decoder(tiny_moe, decoder_options);
    Sequence sequence = model.new_sequence();
    logits[i].resize(32 * 256);
    ASSERT_TRUE(model.forward(tokens, sequence, logits[i]).ok());
  }
  double kl = 0;
  for (int t = 0; t < 31; ++t) {
    double sums[2] = {};
    for (int i = 0; i < 2; ++i)
      for (int v = 0; v < 256; ++v) sums[i] += std::exp(static_cast<double>(logits[i][t * 256 + v]));
    for (int v = 0; v < 256; ++v) {
      const double p = std::exp(static_cast<double>(logits[0][t * 256 + v])) / sums[0];
      const double q = std::exp(static_cast<double>(logits[1][t * 256 + v])) / sums[1];
      kl += p * std::log(p / q);
    }
  }
  EXPECT_NEAR((*rows)[0].kl, kl / 31, 1e-9);
}

// A scheme that does not fit is a row with a reason; the others run.
TEST_F(Eval, CompareGoesOnAfterASchemeThatDoesNotFit) {
  CompareOptions options;
  options.schemes = {SchemeId::int4_g128, SchemeId::int8};
  options.window = 32;
  const std::vector<std::int32_t> tokens(64, 1);
  const auto rows = compare(open_checkpoint(golden_models + "/qwen3-moe-mlp-yarn"), tokens, options);
  ASSERT_TRUE(rows) << rows.status().message();
  ASSERT_EQ(rows->size(), 2u);
  expect_error((*rows)[0].status, Code::invalid_argument, {"128"});
  EXPECT_TRUE((*rows)[1].status.ok()) << (*rows)[1].status.message();
  EXPECT_FALSE((*rows)[1].loss.bits_per_byte);
}

std::string npy(const std::string& descr, const std::string& shape, const std::string& data) {
  std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.resize(117, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + data;
}

template <class T>
std::string bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST(Tokens, EveryIntegerType) {
  const TemporaryDirectory directory;
  const std::vector<std::int32_t> expected = {1, 0, 100, 99};
  const auto check = [&]<class T>(T, const std::string& descr, const std::string& dtype) {
    const std::string data = bytes(std::vector<T>{1, 0, 100, 99});
    const auto plain = read_tokens(directory.write("t.npy", npy(descr, "(4,)", data)), 101);
    ASSERT_TRUE(plain) << plain.status().message();
    EXPECT_EQ(*plain, expected);
    const auto batch = read_tokens(directory.write("t.npy", npy(descr, "(1, 4)", data)), 101);
    ASSERT_TRUE(batch) << batch.status().message();
    EXPECT_EQ(*batch, expected);

    const std::string header = "{\"ids\":{\"dtype\":\"" + dtype + "\",\"shape\":[4],\"data_offsets\":[0," +
                               std::to_string(data.size()) + "]}}";
    const std::string file = bytes(std::vector<std::uint64_t>{header.size()}) + header + data;
    const auto tensor = read_tokens(directory.write("t.safetensors", file), 101);
    ASSERT_TRUE(tensor) << tensor.status().message();
    EXPECT_EQ(*tensor, expected);
  };
  check(std::uint8_t{}, "|u1", "U8");
  check(std::int8_t{}, "|i1", "I8");
  check(std::uint16_t{}, "<u2", "U16");
  check(std::int16_t{}, "<i2", "I16");
  check(std::uint32_t{}, "<u4", "U32");
  check(std::int32_t{}, "<i4", "I32");
  check(std::uint64_t{}, "<u8", "U64");
  check(std::int64_t{}, "<i8", "I64");
  const auto empty = read_tokens(directory.write("t.npy", npy("<i4", "(0,)", "")), 101);
  ASSERT_TRUE(empty) << empty.status().message();
  EXPECT_TRUE(empty->empty());
}

TEST(Tokens, IdsOutsideTheVocabulary) {
  const TemporaryDirectory directory;
  const auto status = [&](const std::string& content) {
    return read_tokens(directory.write("t.npy", content), 100).status();
  };
  expect_error(status(npy("<i4", "(2,)", bytes<std::int32_t>({5, 100}))), Code::bad_file,
               {"t.npy", "token 1 is 100", "[0, 100)"});
  expect_error(status(npy("<i8", "(1,)", bytes<std::int64_t>({-1}))), Code::bad_file, {"token 0 is -1"});
  expect_error(status(npy("<u8", "(1,)", bytes<std::uint64_t>({~std::uint64_t{0}}))), Code::bad_file,
               {"18446744073709551615"});
}

TEST(Tokens, DamagedFiles) {
  const TemporaryDirectory directory;
  const std::string good = npy("<i4", "(3,)", bytes<std::int32_t>({1, 2, 3}));
  const auto status = [&](const std::string& content) {
    return read_tokens(directory.write("t.npy", content), 100).status();
  };
  ASSERT_TRUE(status(good).ok());
  for (std::size_t size = 0; size < good.size(); ++size)
    EXPECT_EQ(status(good.substr(0, size)).code(), Code::bad_file) << size;
  EXPECT_EQ(status(good + "x").code(), Code::bad_file);
  for (const auto& [descr, shape] : {std::pair{">i4", "(3,)"},
                                     {"<f4", "(3,)"},
                                     {"<i4", "(3, 1)"},
                                     {"<i4", "()"},
                                     {"<i4", "(4,)"},
                                     {"<i4", "(99999999999999999999,)"},
                                     {"<i4", "(-3,)"},
                                     {"<i4", "3"}})
    EXPECT_EQ(status(npy(descr, shape, bytes<std::int32_t>({1, 2, 3}))).code(), Code::bad_file)
        << descr << shape;
  // No byte of the header, changed, may do harm.
  for (std::size_t i = 0; i < 70; ++i) {
    std::string damaged = good;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x15);
    (void)status(damaged);
  }
  expect_error(read_tokens(directory.write("t.txt", "1 2 3"), 100).status(), Code::invalid_argument,
               {"t.txt", ".npy"});
  EXPECT_EQ(read_tokens(directory / "missing.npy", 100).status().code(), Code::io_error);
}

}  // namespace
}  // namespace gatefold
