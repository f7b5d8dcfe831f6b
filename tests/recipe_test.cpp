// Recipes: what a file may say, what it means for a model, and checkpoints written by one.
#include "gatefold/recipe.h"

#include "gatefold/calibrate.h"
#include "model_files.h"

namespace gatefold {
namespace {

const std::string mixed = R"({"rules": [
  {"modules": "model\\.layers\\.(0|3)\\.mlp\\.experts\\.", "scheme": "int4_g32"},
  {"modules": "model\\.layers\\.2\\.mlp\\.experts\\.", "scheme": "none"},
  {"modules": ".*\\.experts\\.", "scheme": "mxfp4"},
  {"modules": ".*\\.o_proj", "scheme": "int8_aint8"},
  {"modules": ".*", "scheme": "fp8_block"}]})";

Recipe parse(const std::string& text) {
  const auto recipe = parse_recipe(text, "r.json");
  if (!recipe) throw std::runtime_error(recipe.status().message());
  return *recipe;
}

void expect_words(const Status& status, std::initializer_list<const char*> words) {
  ASSERT_FALSE(status.ok());
  for (const char* word : words)
    EXPECT_NE(status.message().find(word), std::string::npos) << word << " in: " << status.message();
}

TEST(Recipe, BadFiles) {
  const auto status = [](const char* text) { return parse_recipe(text, "r.json").status(); };
  expect_words(status("[]"), {"r.json"});
  expect_words(status("{}"), {"r.json", "no rules"});
  expect_words(status(R"({"rules": {}})"), {"r.json", "rules is {}, not an array"});
  expect_words(status(R"({"rules": [], "kv": "fp8"})"), {"r.json", "'kv'", "kv_cache"});
  expect_words(status(R"({"rules": [], "kv_cache": "fp8"})"), {"r.json", "'fp8'", "fp8_e4m3"});
  expect_words(status(R"({"rules": [7]})"), {"r.json", "rules[0]", "7"});
  expect_words(status(R"({"rules": [{"modules": "a", "scheme": "int8"}, {"modules": "b"}]})"),
               {"r.json", "rules[1]", "no scheme"});
  expect_words(status(R"({"rules": [{"scheme": "int8"}]})"), {"rules[0]", "no modules"});
  expect_words(status(R"({"rules": [{"modules": "a", "scheme": "int3"}]})"), {"rules[0]", "'int3'"});
  expect_words(status(R"({"rules": [{"modules": "a", "scheme": "bf16"}]})"), {"rules[0]", "bf16", "none"});
  expect_words(status(R"({"rules": [{"modules": "(a", "scheme": "int8"}]})"), {"rules[0]", "'(a'"});
  expect_words(status(R"({"rules": [{"modules": "a", "scheme": "int8", "bits": 4}]})"),
               {"rules[0]", "'bits'", "modules, scheme"});
  expect_words(status(R"({"rules": [], "rules": []})"), {"r.json", "rules"});
  expect_words(read_recipe("/nowhere/r.json").status(), {"/nowhere/r.json"});
}

TEST(Recipe, SurvivesItsText) {
  Recipe recipe = parse(mixed);
  recipe.fp8_kv_cache = true;
  recipe.comment = "a \"comment\"";
  const TemporaryDirectory folder;
  for (int round = 0; round < 2; ++round)  // the second replaces the file
    ASSERT_TRUE(write_recipe(recipe, folder / "r.json").ok());
  const auto back = read_recipe(folder / "r.json");
  ASSERT_TRUE(back) << back.status().message();
  EXPECT_EQ(back->name, (folder / "r.json").string());
  EXPECT_EQ(back->comment, recipe.comment);
  EXPECT_TRUE(back->fp8_kv_cache);
  ASSERT_EQ(back->rules.size(), recipe.rules.size());
  for (std::size_t i = 0; i < recipe.rules.size(); ++i) {
    EXPECT_EQ(back->rules[i].modules, recipe.rules[i].modules);
    EXPECT_EQ(back->rules[i].scheme, recipe.rules[i].scheme);
  }
  expect_words(write_recipe(recipe, "/nowhere/r.json"), {"/nowhere/r.json"});
}

TEST(Recipe, TheFirstRuleThatMatchesDecides) {
  const auto schemes = resolve(parse(mixed), open_checkpoint(tiny_moe));
  ASSERT_TRUE(schemes) << schemes.status().message();
  const std::vector<std::optional<SchemeId>> experts = {SchemeId::int4_g32, SchemeId::mxfp4, std::nullopt,
                                                        SchemeId::int4_g32};
  EXPECT_EQ(schemes->experts, experts);
  EXPECT_EQ(schemes->others.size(), 16u);  // q, k, v, o; no router, embedding or norm
  EXPECT_EQ(schemes->other("model.layers.1.self_attn.o_proj"), SchemeId::int8_aint8);
  EXPECT_EQ(schemes->other("model.layers.1.self_attn.q_proj"), SchemeId::fp8_block);
}

TEST(Recipe, SelectsEveryKindOfMatrix) {
  const Recipe all = parse(R"({"rules": [{"modules": ".*", "scheme": "int8"}]})");
  const auto shared = resolve(all, open_checkpoint(golden_models + "/qwen2-moe-dynamic"));
  ASSERT_TRUE(shared) << shared.status().message();
  EXPECT_TRUE(shared->other("model.layers.0.mlp.shared_expert.down_proj"));
  EXPECT_TRUE(shared->other("lm_head"));
  EXPECT_FALSE(shared->other("model.layers.0.mlp.shared_expert_gate"));
  EXPECT_FALSE(shared->other("model.layers.0.mlp.gate"));
  EXPECT_FALSE(shared->other("model.embed_tokens"));
  const auto dense = resolve(all, open_checkpoint(golden_models + "/qwen3-moe-mlp-yarn"));
  ASSERT_TRUE(dense) << dense.status().message();
  bool found = false;
  for (std::size_t i = 0; i < dense->experts.size(); ++i)
    found |= !dense->experts[i] && dense->other("model.layers." + std::to_string(i) + ".mlp.up_proj");
  EXPECT_TRUE(found);
}

TEST(Recipe, WhatAModelCannotFollow) {
  const auto status = [](const std::string& rules, const std::string& model = tiny_moe) {
    return resolve(parse("{\"rules\": [" + rules + "]}"), open_checkpoint(model)).status();
  };
  expect_words(status(R"({"modules": "lm_head", "scheme": "int8"})"),  // tied to the embedding
               {"r.json", "rules[0]", "'lm_head'", "int8", "matches no matrix"});
  expect_words(status(R"({"modules": ".*", "scheme": "int8"}, {"modules": ".*o_proj", "scheme": "mxfp4"})"),
               {"rules[1]", "o_proj", "rules before it"});
  expect_words(status(R"({"modules": ".*experts\\..*down_proj", "scheme": "int8"},
                         {"modules": ".*experts", "scheme": "mxfp4"})"),
               {"r.json", "layers.0.mlp.experts.0", "mxfp4", "rules[1]", "int8", "rules[0]", "one scheme"});
  expect_words(status(R"({"modules": ".*\\.gate_proj", "scheme": "int8"})"), {"no rule", "none"});
  expect_words(
      status(R"({"modules": ".*shared_expert.up", "scheme": "int8"})", golden_models + "/qwen2-moe-dynamic"),
      {"shared_expert.gate_proj", "shared_expert.up_proj", "one scheme"});
  expect_words(status(R"({"modules": ".*", "scheme": "int4_g128"})", golden_models + "/qwen2-moe-dynamic"),
               {"rules[0]", "int4_g128", "gate_proj", "32", "group 128"});

  const TemporaryDirectory folder;
  ConvertOptions options;
  options.recipe = parse(mixed);
  ASSERT_TRUE(convert(open_checkpoint(tiny_moe), folder / "q", options));
  expect_words(status(R"({"modules": ".*", "scheme": "int8"})", (folder / "q").string()),
               {"quantized already"});
}

class WrittenByRecipe : public testing::Test {
 protected:
  Checkpoint write(const std::string& model, const Recipe& recipe) {
    ConvertOptions options;
    options.recipe = recipe;
    const auto report = convert(open_checkpoint(model), folder_ / "out", options);
    EXPECT_TRUE(report) << report.status().message();
    return open_checkpoint((folder_ / "out").string());
  }

  std::vector<std::int32_t> tokens(const Checkpoint& checkpoint, std::size_t count) {
    std::vector<std::int32_t> ids(count);
    for (std::size_t i = 0; i < count; ++i)
      ids[i] = static_cast<std::int32_t>(i * 7919 % static_cast<std::size_t>(checkpoint.config().vocab));
    return ids;
  }

  /// The written model computes what the recipe makes of the source on load, bit for bit.
  void expect_same_as_on_load(const std::string& model, const Recipe& recipe) {
    const auto ids = tokens(write(model, recipe), 96);
    const Decoder stored = load_decoder((folder_ / "out").string());
    const Decoder loaded = load_decoder(model, {.recipe = recipe});
    EXPECT_EQ(stored.schemes(), loaded.schemes());
    EXPECT_EQ(stored.expert_bytes(), loaded.expert_bytes());
    const auto from_file = evaluate(stored, ids, {.window = 32});
    const auto on_load = evaluate(loaded, ids, {.window = 32});
    const auto plain = evaluate(load_decoder(model), ids, {.window = 32});
    ASSERT_TRUE(from_file && on_load && plain);
    EXPECT_EQ(from_file->nats_per_token, on_load->nats_per_token);
    EXPECT_NE(from_file->nats_per_token, plain->nats_per_token);
    EXPECT_NEAR(from_file->nats_per_token, plain->nats_per_token, 0.1);
  }

  static void expect_equal(const QuantizedMatrix& read, SchemeId id, const TensorView& weight) {
    const auto made = quantize(id, {weight.data, weight.dtype, weight.shape[0], weight.shape[1]});
    ASSERT_TRUE(made) << made.status().message();
    EXPECT_EQ(read.scheme, id);
    EXPECT_EQ(read.values, made->values);
    EXPECT_EQ(read.scales, made->scales);
  }

  TemporaryDirectory folder_;
};

TEST_F(WrittenByRecipe, IsReadBackAsItWasWritten) {
  const Checkpoint source = open_checkpoint(tiny_moe), written = write(tiny_moe, parse(mixed));
  const SchemeId expected[] = {SchemeId::int4_g32, SchemeId::mxfp4, SchemeId::bf16, SchemeId::int4_g32};
  for (int layer = 0; layer < 4; ++layer) {
    const auto stored = written.stored_scheme(layer);
    ASSERT_TRUE(stored) << stored.status().message();
    EXPECT_EQ(*stored, expected[layer]);
  }
  EXPECT_FALSE(written.stored_scheme());
  const auto expert = written.expert(1, 7, Projection::down);
  ASSERT_TRUE(expert) << expert.status().message();
  expect_equal(std::get<QuantizedMatrix>(*expert), SchemeId::mxfp4,
               *source.tensor("model.layers.1.mlp.experts.7.down_proj.weight"));
  const auto others = written.other_quantized_layers();
  EXPECT_EQ(others.size(), 16u);
  for (const StoredLayer& layer : others) {
    const auto matrix = written.quantized_layer(layer);
    ASSERT_TRUE(matrix) << matrix.status().message();
    const bool o = layer.module.ends_with("o_proj");
    expect_equal(*matrix, o ? SchemeId::int8_aint8 : SchemeId::fp8_block,
                 *source.tensor(layer.module + ".weight"));
  }
  for (const char* name : {"model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.gate.weight"})
    EXPECT_EQ(std::memcmp(source.tensor(name)->data, written.tensor(name)->data, written.tensor(name)->bytes),
              0);
  const std::string& config = written.config_text();
  EXPECT_NE(config.find("\"mixed-precision\""), std::string::npos);
  EXPECT_NE(config.find(R"("re:model\\.layers\\.(0|3)\\.mlp\\.experts\\..*")"), std::string::npos);
}

TEST_F(WrittenByRecipe, RunsLikeOnLoad) {
  expect_same_as_on_load(tiny_moe, parse(mixed));
}

TEST_F(WrittenByRecipe, SharedExpertsAndTheHead) {
  expect_same_as_on_load(golden_models + "/qwen2-moe-dynamic", parse(R"({"rules": [
    {"modules": ".*\\.shared_expert\\.", "scheme": "fp8_channel_afp8"},
    {"modules": ".*\\.1\\.mlp", "scheme": "int8"},
    {"modules": "lm_head", "scheme": "fp8_tensor"}]})"));
}

TEST_F(WrittenByRecipe, DenseLayers) {
  expect_same_as_on_load(golden_models + "/qwen3-moe-mlp-yarn",
                         parse(R"({"rules": [{"modules": ".*", "scheme": "fp8_channel_afp8"}]})"));
}

/// Nothing is quantized twice, and nothing that was is taken for unquantized.
TEST_F(WrittenByRecipe, IsNotQuantizedAgain) {
  const Checkpoint attention =
      write(tiny_moe, parse(R"({"rules": [{"modules": ".*self_attn", "scheme": "fp8_block"}]})"));
  EXPECT_EQ(*attention.stored_scheme(), SchemeId::bf16);
  const ConvertOptions again{.scheme = SchemeId::mxfp4};
  expect_words(convert(attention, folder_ / "again", again).status(),
               {"layers.0.self_attn.k_proj is quantized already", "compressed-tensors", "16 such layers"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "again"));
  expect_words(calibrate(attention, folder_ / "again", tokens(attention, 512), {}).status(),
               {"layers.0.self_attn.k_proj is quantized already"});
}

/// Biases stay beside the layers that they belong to, and are added; also by conventions that know biases.
TEST_F(WrittenByRecipe, BiasesSurviveConversion) {
  const std::string model = golden_models + "/qwen2-moe-dynamic";
  const auto loss = [&](const std::string& directory) {
    const Checkpoint checkpoint = open_checkpoint(directory);
    const auto result =
        evaluate(load_decoder(directory, {.weights_only = true}), tokens(checkpoint, 96), {.window = 32});
    EXPECT_TRUE(result) << result.status().message();
    return result->nats_per_token;
  };
  for (const auto& [scheme, to] :
       {std::pair("int4_channel", "gptq"), std::pair("fp8_channel_afp8", "modelopt")}) {
    const std::string rules = R"({"rules": [{"modules": ".*", "scheme": ")" + std::string(scheme) + R"("}]})";
    const Checkpoint source = write(model, parse(rules));
    const double expected = loss((folder_ / "out").string());
    const auto there = rewrite(source, folder_ / "there", {.to = to});
    ASSERT_TRUE(there) << there.status().message();
    EXPECT_EQ(loss((folder_ / "there").string()), expected) << to;
    const auto back = rewrite(open_checkpoint((folder_ / "there").string()), folder_ / "back",
                              {.to = "compressed-tensors"});
    ASSERT_TRUE(back) << back.status().message();
    EXPECT_EQ(loss((folder_ / "back").string()), expected) << to;
    const Checkpoint copy = open_checkpoint((folder_ / "back").string());
    const std::string bias = "model.layers.1.self_attn.q_proj.bias";
    const auto a = source.tensor(bias), b = copy.tensor(bias);
    ASSERT_TRUE(a && b);
    EXPECT_EQ(std::memcmp(a->data, b->data, a->bytes), 0);
    for (const char* name : {"out", "there", "back"}) std::filesystem::remove_all(folder_ / name);
  }
}

TEST_F(WrittenByRecipe, IsARowOfCompare) {
  const Checkpoint source = open_checkpoint(tiny_moe), written = write(tiny_moe, parse(mixed));
  const std::string text = read_file(tiny_moe + "/valid.txt").substr(0, 2048);
  CompareOptions options;
  options.schemes = {SchemeId::mxfp4};
  options.recipes = {parse(mixed)};
  options.others = {written};
  const auto rows = compare(source, *text_tokens(source, text), options);
  ASSERT_TRUE(rows) << rows.status().message();
  ASSERT_EQ(rows->size(), 3u);
  for (const CompareRow& row : *rows) EXPECT_TRUE(row.status.ok()) << row.status.message();
  EXPECT_EQ((*rows)[1].name, "r.json");
  EXPECT_EQ((*rows)[1].schemes, "int4_g32 and mxfp4 and bf16");
  EXPECT_DOUBLE_EQ((*rows)[1].bits_per_weight, (4.5 + 4.25 + 16 + 4.5) / 4);
  EXPECT_EQ((*rows)[1].kl, (*rows)[2].kl);
  EXPECT_GT((*rows)[1].kl, 0);
}

TEST_F(WrittenByRecipe, GptqFollowsIt) {
  const Checkpoint source = open_checkpoint(tiny_moe);
  const auto text = *text_tokens(source, read_file(tiny_moe + "/calibration.txt").substr(0, 8192));
  CalibrateOptions options{.recipe = parse(mixed)};
  std::int64_t asked = 0;
  options.cancelled = [&] { return ++asked > 20; };
  EXPECT_FALSE(calibrate(source, folder_ / "gptq", text, options));
  options.cancelled = {};
  options.resume = true;
  const auto report = calibrate(source, folder_ / "gptq", text, options);
  ASSERT_TRUE(report) << report.status().message();
  EXPECT_EQ(report->resumed_layers, 1);
  const Checkpoint written = open_checkpoint((folder_ / "gptq").string());
  EXPECT_EQ(*written.stored_scheme(0), SchemeId::int4_g32);
  EXPECT_EQ(*written.stored_scheme(2), SchemeId::bf16);
  CompareOptions rows_options;
  rows_options.schemes = {SchemeId::mxfp4};
  rows_options.recipes = {parse(mixed)};
  rows_options.others = {written};
  const auto rows =
      compare(source, *text_tokens(source, read_file(tiny_moe + "/valid.txt").substr(0, 8192)), rows_options);
  ASSERT_TRUE(rows) << rows.status().message();
  EXPECT_LT((*rows)[2].kl, 0.85 * (*rows)[1].kl);
}

TEST_F(WrittenByRecipe, WhatCalibrationRefuses) {
  const std::string model = golden_models + "/qwen2-moe-dynamic";
  const Checkpoint source = open_checkpoint(model);
  const auto status = [&](const std::string& rules, Method method) {
    return calibrate(source, folder_ / "out", tokens(source, 128),
                     {.recipe = parse("{\"rules\": [" + rules + "]}"), .method = method, .window = 32})
        .status();
  };
  expect_words(status(R"({"modules": ".*", "scheme": "int8"})", Method::awq),
               {"awq", "shared_expert", "gptq"});
  expect_words(status(R"({"modules": ".*experts", "scheme": "int8"})", Method::smoothquant),
               {"smoothquant", "int8"});
  expect_words(status(R"({"modules": "lm_head", "scheme": "int8"})", Method::gptq), {"gptq", "none"});
  EXPECT_TRUE(status(R"({"modules": ".*", "scheme": "int8"})", Method::gptq).ok());
}

}  // namespace
}  // namespace gatefold
