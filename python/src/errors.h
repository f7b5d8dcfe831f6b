#pragma once
/// \file
/// Status and Result as Python exceptions.

#include <nanobind/nanobind.h>

#include <utility>

#include "gatefold/status.h"

namespace gatefold::python {

/// Becomes gatefold.InvalidArgument, ... by its code.
struct StatusError {
  Status status;
};

inline void check(Status status) {
  if (!status.ok()) throw StatusError{std::move(status)};
}

template <class T>
T value(Result<T> result) {
  if (!result) throw StatusError{result.status()};
  return std::move(*result);
}

[[noreturn]] inline void invalid(std::string message) {
  throw StatusError{{Code::invalid_argument, std::move(message)}};
}

/// The exception classes, and how StatusError becomes them.
void add_errors(nanobind::module_& m);

}  // namespace gatefold::python
