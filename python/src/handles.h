#pragma once
/// \file
/// Numbers by which torch operators know packed weights.

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "errors.h"

namespace gatefold::python {

/// Packed weights of any kind. Thread-safe.
class Handled : public std::enable_shared_from_this<Handled> {
 public:
  virtual ~Handled();
  Handled(const Handled&) = delete;
  Handled& operator=(const Handled&) = delete;

  template <class T, class... Arguments>
  static std::shared_ptr<T> make(Arguments&&... arguments) {
    auto made = std::make_shared<T>(std::forward<Arguments>(arguments)...);
    enter(made);
    return made;
  }

  /// A number for these weights; never used again in this process.
  std::int64_t handle() const { return handle_; }
  /// Another one, which follows from the name alone. Throws if others that live have the name.
  std::int64_t publish(const std::string& name);

  /// Throws if there are none of this kind any more, by the name of the argument that is a handle.
  template <class T>
  static std::shared_ptr<T> find(std::int64_t handle, const char* argument) {
    auto found = std::dynamic_pointer_cast<T>(look_up(handle));
    if (found == nullptr)
      invalid(fmt::format("{} = {} is the handle of no packed {} (any more)", argument, handle, T::kWhat));
    return found;
  }

 protected:
  Handled();

 private:
  static void enter(const std::shared_ptr<Handled>& made);
  static std::shared_ptr<Handled> look_up(std::int64_t handle);

  std::int64_t handle_;
};

}  // namespace gatefold::python
