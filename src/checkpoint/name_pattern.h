#pragma once
/// \file
/// The regular expressions of `targets` and `ignore` in a quantization_config. They come from untrusted files
/// and are tried on every module of a model, so they are matched by simulating the automaton: time is bounded
/// by states times length, without backtracking or recursion (std::regex promises neither).

#include <bitset>
#include <cstdint>
#include <string_view>
#include <vector>

#include "gatefold/status.h"

namespace gatefold {

/// The part of Python's `re` that selects names: literals, `.`, classes, \d \w \s and their complements,
/// groups, `|`, `* + ? {m,n}` (lazy or not), `^`, `$`. Not: look-around, back-references, flags, \b.
class NamePattern {
 public:
  /// Errors: syntax, a construct outside the subset, or more than 512 characters or 4096 states.
  static Result<NamePattern> compile(std::string_view pattern);

  /// As re.match: a prefix of `name` matches.
  bool matches(std::string_view name) const;

  /// A match takes at most this many steps per character.
  std::size_t states() const { return program_.size(); }

 private:
  enum class Op : std::uint8_t { set, split, begin, end, accept };
  struct Instruction {
    Op op = Op::accept;
    int argument = 0;        // set: index into sets_; split: both the next instruction and this far from here
    bool only_jump = false;  // split: not to the next
  };
  using Program = std::vector<Instruction>;
  using Set = std::bitset<256>;
  class Parser;

  Program program_;
  std::vector<Set> sets_;
};

}  // namespace gatefold
