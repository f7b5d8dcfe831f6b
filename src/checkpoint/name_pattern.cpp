#include "checkpoint/name_pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>

namespace gatefold {
namespace {
constexpr std::size_t max_length = 512;
constexpr std::size_t max_states = 4096;
constexpr int max_depth = 32;
}  // namespace

/// Recursive descent. Every function returns code with relative jumps, so that pieces can be joined and
/// repeated by copying.
class NamePattern::Parser {
 public:
  Parser(std::string_view text, std::vector<Set>& sets) : text_(text), sets_(sets) {}

  Program parse() {
    Program code = alternatives(0);
    if (at_ < text_.size()) fail("unbalanced )");
    code.push_back({});
    return code;
  }
  const std::string& error() const { return error_; }

 private:
  void fail(std::string_view what) {
    if (error_.empty()) error_ = fmt::format("{} at character {}", what, at_);
    at_ = text_.size();
  }
  bool more() const { return at_ < text_.size(); }
  char peek() const { return text_[at_]; }
  bool eat(std::string_view what) {
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  void append(Program& code, const Program& tail) {
    if (code.size() + tail.size() >= max_states) return fail("too many states");
    code.insert(code.end(), tail.begin(), tail.end());
  }

  Program alternatives(int depth) {
    if (depth > max_depth) fail("groups nested too deeply");
    Program code = sequence(depth);
    while (eat("|")) {
      const Program other = sequence(depth);
      Program both{{Op::split, static_cast<int>(code.size()) + 2, false}};
      append(both, code);
      both.push_back({Op::split, static_cast<int>(other.size()) + 1, true});
      append(both, other);
      code = std::move(both);
    }
    return code;
  }

  Program sequence(int depth) {
    Program code;
    while (more() && peek() != '|' && peek() != ')') append(code, repeated(depth));
    return code;
  }

  Program repeated(int depth) {
    Program one = atom(depth);
    int least = 1, most = 1;  // most < 0: no limit
    if (eat("*")) {
      least = 0, most = -1;
    } else if (eat("+")) {
      most = -1;
    } else if (eat("?")) {
      least = 0;
    } else if (!braces(least, most)) {
      return one;
    }
    eat("?");  // lazy: which match is found does not matter here, only whether there is one
    if (more() && std::string_view("*+?{").find(peek()) != std::string_view::npos) fail("multiple repeat");

    const int size = static_cast<int>(one.size());
    Program code;
    for (int i = 0; i < least && error_.empty(); ++i) append(code, one);
    if (most < 0) {
      append(code, {{Op::split, size + 2, false}});
      append(code, one);
      append(code, {{Op::split, -size - 1, true}});
    }
    for (int i = least; i < most && error_.empty(); ++i) {
      append(code, {{Op::split, size + 1, false}});
      append(code, one);
    }
    return code;
  }

  /// {m}, {m,n}, {m,}, {,n}; anything else in braces is literal, as in Python.
  bool braces(int& least, int& most) {
    const std::size_t close = text_.find('}', at_);
    if (!more() || peek() != '{' || close == std::string_view::npos) return false;
    const std::string_view inside = text_.substr(at_ + 1, close - at_ - 1);
    const std::size_t comma = std::min(inside.find(','), inside.size());
    const std::string_view low = inside.substr(0, comma);
    const std::string_view high = comma < inside.size() ? inside.substr(comma + 1) : low;
    const auto number = [](std::string_view digits) {
      const bool valid = digits.size() <= 4 && std::all_of(digits.begin(), digits.end(),
                                                           [](char c) { return c >= '0' && c <= '9'; });
      int value = valid ? 0 : std::numeric_limits<int>::max();
      for (const char c : valid ? digits : std::string_view{}) value = value * 10 + (c - '0');
      return value;
    };
    if (inside.empty() || inside == ",") return false;
    least = number(low);
    most = high.empty() ? -1 : number(high);
    if (std::max(least, most) == std::numeric_limits<int>::max()) {
      least = most = 1;
      return false;
    }
    if (most >= 0 && most < least) fail("minimum repeat is greater than maximum repeat");
    at_ = close + 1;
    return true;
  }

  Program atom(int depth) {
    if (eat("(")) {
      if (!eat("?:") && more() && peek() == '?')
        fail("look-around, flags and named groups are not supported");
      Program code = alternatives(depth + 1);
      if (!eat(")")) fail("missing )");
      return code;
    }
    if (eat("^") || eat("\\A")) return {{Op::begin}};
    if (eat("$") || eat("\\Z")) return {{Op::end}};
    if (eat(".")) return any_of(~Set{}.set('\n'));
    if (eat("[")) return any_of(bracket());
    if (std::string_view("*+?").find(peek()) != std::string_view::npos) fail("nothing to repeat");
    int character = 0;
    return any_of(one(character));
  }

  Program any_of(const Set& set) {
    auto found = std::find(sets_.begin(), sets_.end(), set);
    if (found == sets_.end()) found = sets_.insert(found, set);
    return {{Op::set, static_cast<int>(found - sets_.begin())}};
  }

  /// One character, or an escape. `character` is what it stands for if it is one, else -1.
  Set one(int& character) {
    character = -1;
    if (!more()) return fail("unexpected end"), Set{};
    char c = text_[at_++];
    if (c == '\\') {
      if (!more()) return fail("unexpected end"), Set{};
      c = text_[at_++];
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      if (letter) return char_class(c);
      if (c >= '0' && c <= '9') return fail("back-references are not supported"), Set{};
    }
    character = static_cast<unsigned char>(c);
    return Set{}.set(static_cast<unsigned char>(c));
  }

  Set char_class(char letter) {
    Set set;
    const auto add = [&](int from, int to) {
      for (int x = from; x <= to; ++x) set.set(static_cast<std::size_t>(x));
    };
    switch (letter | 0x20) {
      case 'd':
        add('0', '9');
        break;
      case 'w':
        add('0', '9'), add('a', 'z'), add('A', 'Z'), add('_', '_');
        break;
      case 's':
        add('\t', '\r'), add(' ', ' ');
        break;
      default:
        fail(fmt::format("\\{} is not supported", letter));
    }
    return (letter & 0x20) != 0 ? set : ~set;
  }

  Set bracket() {
    Set set;
    const bool negated = eat("^");
    for (bool first = true; error_.empty() && (first || !eat("]")); first = false) {
      int low = 0, high = 0;
      set |= one(low);
      const std::string_view rest = text_.substr(at_);
      if (!rest.starts_with("-") || rest.starts_with("-]")) continue;
      ++at_;
      one(high);
      if (low < 0 || high < low) fail("bad character range");
      for (int x = low; error_.empty() && x <= high; ++x) set.set(static_cast<std::size_t>(x));
    }
    return negated ? ~set : set;
  }

  std::string_view text_;
  std::vector<Set>& sets_;
  std::size_t at_ = 0;
  std::string error_;
};

Result<NamePattern> NamePattern::compile(std::string_view pattern) {
  if (pattern.size() > max_length)
    return Status(Code::unsupported,
                  fmt::format("a pattern of {} characters; the limit is {}", pattern.size(), max_length));
  NamePattern compiled;
  Parser parser(pattern, compiled.sets_);
  compiled.program_ = parser.parse();
  if (!parser.error().empty())
    return Status(Code::unsupported, fmt::format("pattern '{}': {}", pattern, parser.error()));
  return compiled;
}

bool NamePattern::matches(std::string_view name) const {
  // `seen[pc]` is the position at which pc was last added, so that every state is visited once per position.
  std::vector<std::size_t> seen(program_.size(), std::string_view::npos);
  std::vector<int> now{0}, next;
  for (std::size_t at = 0; at <= name.size() && !now.empty(); ++at) {
    next.clear();
    while (!now.empty()) {
      const int pc = now.back();
      now.pop_back();
      if (seen[static_cast<std::size_t>(pc)] == at) continue;
      seen[static_cast<std::size_t>(pc)] = at;
      const Instruction& instruction = program_[static_cast<std::size_t>(pc)];
      switch (instruction.op) {
        case Op::accept:
          return true;
        case Op::set:
          if (at < name.size() &&
              sets_[static_cast<std::size_t>(instruction.argument)][static_cast<unsigned char>(name[at])])
            next.push_back(pc + 1);
          break;
        case Op::split:
          now.push_back(pc + instruction.argument);
          if (!instruction.only_jump) now.push_back(pc + 1);
          break;
        case Op::begin:
          if (at == 0) now.push_back(pc + 1);
          break;
        case Op::end:
          if (at == name.size()) now.push_back(pc + 1);
          break;
      }
    }
    std::swap(now, next);
  }
  return false;
}

}  // namespace gatefold
