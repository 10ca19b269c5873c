#pragma once

#include <string>
#include <utility>

#include <nanobind/nanobind.h>

#include "gradwire/status.h"

namespace gradwire::python {

// Adds GradwireError and NonFiniteWarning to the module.
void bind_errors(nanobind::module_& module);

// Takes both classes from gradwire._core, for another module.
void import_errors();

// Raises GradwireError (a ValueError) with the message; `.code` is the name of the status.
[[noreturn]] void raise(const Status& status);
[[noreturn]] inline void raise(StatusCode code, const std::string& message) {
  raise(Status(code, message));
}

// Issues a NonFiniteWarning; raises it if the user turned warnings into errors.
void warn_non_finite(const Status& status);

inline void raise_if_error(const Status& status) {
  if (!status.ok()) raise(status);
}

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}

}  // namespace gradwire::python
