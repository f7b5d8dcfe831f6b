// The header of a safetensors file: everything the format demands, one broken file each.
#include <gtest/gtest.h>

#include <limits>

#include "checkpoint/safetensors.h"
#include "checkpoint_files.h"

namespace gatefold {
namespace {

Result<SafetensorsHeader> parse(const std::string& file) {
  return parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "dir/x.safetensors");
}

void expect_bad(const std::string& file, std::initializer_list<std::string_view> parts) {
  const auto header = parse(file);
  ASSERT_FALSE(header);
  expect_error(header.status(), Code::bad_file, parts);
  EXPECT_TRUE(header.status().message().starts_with("dir/x.safetensors: ")) << header.status().message();
}

/// One tensor 'w' with these members.
std::string one(const std::string& members, std::size_t data_bytes) {
  return safetensors("{\"w\":{" + members + "}}", std::string(data_bytes, '\0'));
}

TEST(Safetensors, ReadsEveryDtype) {
  std::vector<FileTensor> tensors;
  for (int i = 0; i <= static_cast<int>(DType::u64); ++i) {
    const auto dtype = static_cast<DType>(i);
    tensors.push_back({std::string(1, static_cast<char>('a' + i)),
                       std::string(name(dtype)),
                       {2, 4},
                       std::string(bits(dtype), 'x')});
  }
  const std::string file = safetensors(tensors);
  const auto header = parse(file);
  ASSERT_TRUE(header) << header.status().message();
  ASSERT_EQ(header->tensors.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(header->tensors[i].name, tensors[i].name);
    EXPECT_EQ(header->tensors[i].dtype, static_cast<DType>(i));
    EXPECT_EQ(header->tensors[i].bytes(), tensors[i].data.size());
    EXPECT_EQ(find_dtype(tensors[i].dtype), static_cast<DType>(i));
  }
  EXPECT_EQ(header->tensors.back().end, file.size());
  EXPECT_EQ(find_dtype("bf16"), std::nullopt);
}

TEST(Safetensors, ScalarsEmptyTensorsMetadataAndPadding) {
  const auto header = parse(safetensors(
      R"({"__metadata__":{"format":"pt","":"x"},"s":{"shape":[],"data_offsets":[0,4],"dtype":"F32"},)"
      R"("e":{"dtype":"I64","shape":[3,0],"data_offsets":[4,4]},"d":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}   )",
      "12345"));
  ASSERT_TRUE(header) << header.status().message();
  EXPECT_EQ(header->metadata.at("format"), "pt");
  ASSERT_EQ(header->tensors.size(), 3u);
  EXPECT_EQ(header->tensors[0].name, "s");
  EXPECT_TRUE(header->tensors[0].shape.empty());
  EXPECT_EQ(header->tensors[1].name, "e");
  EXPECT_EQ(header->tensors[1].bytes(), 0u);
  EXPECT_EQ(header->tensors[2].name, "d");
  EXPECT_TRUE(parse(safetensors("{}")));
}

TEST(Safetensors, Length) {
  expect_bad("", {"0 bytes"});
  expect_bad("1234567", {"7 bytes"});
  std::string file = safetensors("{}");
  const auto with_length = [&](std::uint64_t length) {
    std::memcpy(file.data(), &length, sizeof length);
    return file;
  };
  expect_bad(with_length(3), {"header of 3 bytes", "file has 10"});
  expect_bad(with_length(100'000'000), {"header of 100000000 bytes", "file has 10"});
  expect_bad(with_length(100'000'001), {"100000001", "at most 100000000"});
  expect_bad(with_length(std::numeric_limits<std::uint64_t>::max()), {"18446744073709551615"});
  expect_bad(with_length(0), {"begin with '{'"});
}

TEST(Safetensors, Json) {
  for (const char* header :
       {"[]", " {}", "\xef\xbb\xbf{}", "null", "{", "{\"a\"", "{}x", "{}{}", "{\"a\":1,}", "{'a':1}"})
    EXPECT_FALSE(parse(safetensors(header))) << header;
  expect_bad(safetensors(std::string("{}\0\0", 4)), {"NUL byte at 2"});
  expect_bad(safetensors("{\"\xff\":{}}"), {"UTF-8"});
  expect_bad(safetensors("{\"a\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}"),
             {"'a'", "array"});
  expect_bad(
      safetensors(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":)" + std::string(100'000, '[')),
      {"'a'", "'x'"});
}

TEST(Safetensors, DuplicateKeys) {
  const std::string tensor = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  expect_bad(safetensors("{\"w\":" + tensor + ",\"w\":" + tensor + "}", "1"), {"'w'", "twice"});
  expect_bad(one(R"("dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1])", 1), {"'dtype'", "twice"});
  expect_bad(safetensors(R"({"__metadata__":{"k":"1","k":"2"}})"), {"'k'", "twice"});
}

TEST(Safetensors, Metadata) {
  expect_bad(safetensors(R"({"__metadata__":"x"})"), {"__metadata__", "object"});
  expect_bad(safetensors(R"({"__metadata__":["x"]})"), {"__metadata__", "object"});
  expect_bad(safetensors(R"({"__metadata__":{"k":1}})"), {"__metadata__", "'k'", "1", "string"});
  expect_bad(safetensors(R"({"__metadata__":{"k":{"a":"b"}}})"), {"__metadata__", "'k'", "string"});
  std::string many = R"({"__metadata__":{"k":"")";
  for (int i = 0; i < 1 << 16; ++i) many += ",\"" + std::to_string(i) + "\":\"\"";
  expect_bad(safetensors(many + "}}"), {"__metadata__", "65536"});
}

TEST(Safetensors, Members) {
  expect_bad(safetensors(R"({"w":7})"), {"'w'", "7"});
  expect_bad(safetensors(R"({"w":[]})"), {"'w'", "array"});
  expect_bad(one(R"("shape":[1],"data_offsets":[0,1])", 1), {"'w'", "no dtype"});
  expect_bad(one(R"("dtype":"U8","data_offsets":[0,1])", 1), {"'w'", "no shape"});
  expect_bad(one(R"("dtype":"U8","shape":[1])", 1), {"'w'", "no data_offsets"});
  expect_bad(one(R"("dtype":"U9","shape":[1],"data_offsets":[0,1])", 1), {"'w'", "\"U9\""});
  expect_bad(one(R"("dtype":8,"shape":[1],"data_offsets":[0,1])", 1), {"'w'", "dtype 8"});
  expect_bad(one(R"("dtype":["U8"],"shape":[1],"data_offsets":[0,1])", 1), {"'w'", "'dtype'"});
  expect_bad(one(R"("dtype":"U8","shape":1,"data_offsets":[0,1])", 1), {"'w'", "'shape'"});
  expect_bad(one(R"("dtype":"U8","shape":[[1]],"data_offsets":[0,1])", 1), {"'w'", "'shape'"});
  expect_bad(one(R"("dtype":"U8","shape":{"0":1},"data_offsets":[0,1])", 1), {"'w'", "'shape'"});
  expect_bad(one(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1])", 1), {"'w'", "'strides'"});
}

TEST(Safetensors, Numbers) {
  for (const char* number : {"-1", "1.0", "1e3", "1e300", "18446744073709551616", "9223372036854775808",
                             "\"1\"", "null", "true"}) {
    const std::string n = number;
    expect_bad(one(R"("dtype":"U8","data_offsets":[0,1],"shape":[)" + n + "]", 1), {"'w'", "shape"});
    expect_bad(one(R"("dtype":"U8","shape":[1],"data_offsets":[0,)" + n + "]", 1), {"'w'", "data_offsets"});
  }
  EXPECT_FALSE(parse(one(R"("dtype":"U8","data_offsets":[0,1],"shape":[1e999])", 1)));
  expect_bad(one(R"("dtype":"U8","shape":[1],"data_offsets":[0])", 1), {"'w'", "data_offsets holds 1"});
  expect_bad(one(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,1])", 1), {"'w'", "more than 2"});
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  expect_bad(one(R"("dtype":"U8","data_offsets":[0,1],"shape":[)" + ones + "]", 1), {"'w'", "64 dimensions"});
}

TEST(Safetensors, SizeMustFollowFromShape) {
  expect_bad(one(R"("dtype":"F32","shape":[2,3],"data_offsets":[0,20])", 20),
             {"'w'", "F32 [2, 3]", "[0, 20]", "20 bytes", "need 24"});
  expect_bad(one(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])", 2), {"'w'", "12 bits"});
  expect_bad(one(R"("dtype":"F6_E2M3","shape":[2],"data_offsets":[0,2])", 2), {"'w'", "12 bits"});
  // 2^96 elements: a product that wraps around would be 0.
  expect_bad(one(R"("dtype":"U8","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,0])", 0),
             {"'w'", "4294967296", "overflows"});
  // 2^61 elements fit, their 2^64 bits do not.
  expect_bad(one(R"("dtype":"U8","shape":[2305843009213693952],"data_offsets":[0,0])", 0),
             {"'w'", "overflows"});
}

TEST(Safetensors, Layout) {
  const auto two = [](const char* a, const char* b, std::size_t bytes) {
    return safetensors(std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a +
                           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                       std::string(bytes, '\0'));
  };
  EXPECT_TRUE(parse(two("[4,8]", "[0,4]", 8)));
  expect_bad(two("[0,4]", "[2,6]", 8), {"'b'", "[2, 6]", "ends at 4", "overlap"});
  expect_bad(two("[0,4]", "[0,4]", 4), {"'b'", "[0, 4]", "overlap"});
  expect_bad(two("[0,4]", "[5,9]", 9), {"'b'", "[5, 9]", "ends at 4", "gap"});
  expect_bad(two("[1,5]", "[5,9]", 9), {"'a'", "[1, 5]", "gap"});
  expect_bad(two("[0,4]", "[8,4]", 8), {"'b'", "[8, 4]", "before the beginning"});
  expect_bad(two("[0,4]", "[4,8]", 7), {"'b'", "[4, 8]", "7 bytes", "truncated"});
  expect_bad(two("[0,4]", "[4,8]", 9), {"9 bytes", "need 8"});
  expect_bad(safetensors("{}", "1"), {"1 bytes", "need 0"});
}

TEST(Safetensors, MessagesAreShortAndPrintable) {
  const auto header = parse(safetensors("{\"" + std::string(100'000, 'n') + "\":7}"));
  ASSERT_FALSE(header);
  EXPECT_LT(header.status().message().size(), 1000u);
  const auto escape = parse(safetensors(R"({"\u001b[31m\n":7})"));
  ASSERT_FALSE(escape);
  for (const char c : escape.status().message()) EXPECT_GE(c, ' ');
}

// Time and memory stay in proportion to the file: nothing is sized by a number in it.
TEST(Safetensors, ManyTensors) {
  std::string header = "{";
  constexpr int count = 100'000;
  for (int i = 0; i < count; ++i)
    header += (i ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  const auto parsed = parse(safetensors(header + "}"));
  ASSERT_TRUE(parsed) << parsed.status().message();
  EXPECT_EQ(parsed->tensors.size(), static_cast<std::size_t>(count));
}

}  // namespace
}  // namespace gatefold
