#pragma once
/// \file
/// Errors as values. Public functions return `Status` or `Result<T>`; the library never prints, throws on
/// bad input, aborts or exits. A message names the file, the tensor and the values that are wrong.

#include <cassert>
#include <optional>
#include <string>
#include <utility>

namespace gatefold {

enum class Code : unsigned char {
  ok,
  invalid_argument,  ///< the caller's values are wrong (shape, dtype, option, id out of range)
  bad_file,          ///< a file's content is wrong or inconsistent
  io_error,          ///< the operating system refused (missing, unreadable, disk full)
  unsupported,       ///< well-formed, but no code here handles it
  internal,          ///< a check of the library itself failed (workspace canaries)
};

/// Success, or a code with a message.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

/// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) { assert(!status_.ok()); }

  explicit operator bool() const { return value_.has_value(); }
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace gatefold
