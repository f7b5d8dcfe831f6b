#pragma once
/// \file
/// Libraries of the system that are loaded when they are asked for: nothing links them.

#include <string>

#include "gatefold/status.h"

namespace gatefold::cuda {

/// Stays loaded until the process ends.
class DynamicLibrary {
 public:
  /// Errors: it is not there (unsupported, with its name and the reason).
  static Result<DynamicLibrary> open(const char* name);

  /// Looks a function up. The first that is missing is what `status` says.
  template <class Function>
  void find(const char* symbol, Function*& function) {
    function = reinterpret_cast<Function*>(address(symbol));
  }
  const Status& status() const { return status_; }

 private:
  void* address(const char* symbol);

  const char* name_ = nullptr;
  void* handle_ = nullptr;
  Status status_;
};

}  // namespace gatefold::cuda
