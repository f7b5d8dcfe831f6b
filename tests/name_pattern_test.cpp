#include "checkpoint/name_pattern.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace gatefold {
namespace {

TEST(NamePattern, MatchesAsPythonDoes) {
  struct Case {
    const char *pattern, *name;
    bool matches;
  };
  const Case cases[] = {
      {"model", "model.layers", true},
      {"layers", "model.layers", false},
      {".*lm_head", "lm_head", true},
      {".*mlp.gate$", "model.layers.0.mlp.gate", true},
      {".*mlp.gate$", "model.layers.0.mlp.gate_proj", false},
      {R"(.*\.experts\.\d+\.(gate|up|down)_proj$)", "model.layers.3.mlp.experts.17.up_proj", true},
      {R"(.*\.experts\.\d+\.(gate|up|down)_proj$)", "model.layers.3.mlp.experts.x.up_proj", false},
      {R"(model\.layers\.(?:[0-9]|1[0-5])\.)", "model.layers.15.mlp", true},
      {R"(model\.layers\.(?:[0-9]|1[0-5])\.)", "model.layers.16.mlp", false},
      {"a{2,3}b", "aab", true},
      {"a{2,3}b", "aaaab", false},
      {"a{,2}$", "aa", true},
      {"a{2}$", "aaa", false},
      {"a{2,}$", "aaaaa", true},
      {"a{x}", "a{x}", true},
      {"[^.]+$", "abc", true},
      {"[^.]+$", "a.c", false},
      {R"([\w.-]+$)", "a_b.c-d", true},
      {"[]a]$", "]", true},
      {R"(\W)", "a", false},
      {R"(a+?b??c)", "aac", true},
      {"(a|b)*c", "abbac", true},
      {"(a*)*b", "aaaa", false},
      {"", "anything", true},
      {"^$", "", true},
      {"x|", "y", true},
  };
  for (const Case& c : cases) {
    const Result<NamePattern> pattern = NamePattern::compile(c.pattern);
    ASSERT_TRUE(pattern.ok()) << pattern.status().message();
    EXPECT_EQ(pattern->matches(c.name), c.matches) << c.pattern << " on " << c.name;
  }
}

TEST(NamePattern, RefusesWhatItDoesNotKnow) {
  for (const std::string bad : {"(", ")", "(a", "a)", "[a", "[", "*a", "a**", "a{3,1}", "\\", "[z-a]",
                                "(?!a)", "(?P<x>a)", "\\1", "\\bfoo", "(?i)a", "[\\w-z]"})
    EXPECT_FALSE(NamePattern::compile(bad).ok()) << bad;
  EXPECT_FALSE(NamePattern::compile(std::string(513, 'a')).ok());
  EXPECT_FALSE(NamePattern::compile("((a{100}){100}){100}").ok());
  EXPECT_FALSE(NamePattern::compile(std::string(200, '(') + std::string(200, ')')).ok());
}

TEST(NamePattern, IsLinearWhereBacktrackingIsNot) {
  const std::string name(2000, 'a');
  for (const char* slow : {"(a+)+$x", "(a|a)*b", "(.*)(.*)(.*)(.*)(.*)(.*)x", "(a?){500}a{500}b"}) {
    const Result<NamePattern> pattern = NamePattern::compile(slow);
    ASSERT_TRUE(pattern.ok()) << pattern.status().message();
    EXPECT_FALSE(pattern->matches(name));
  }
}

}  // namespace
}  // namespace gatefold
