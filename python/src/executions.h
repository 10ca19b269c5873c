#pragma once

#include <optional>
#include <string>

#include "errors.h"
#include "gradwire/execution.h"

namespace gradwire::python {

// Keeps the started threads for this thread's next call, because starting them takes longer than
// encoding a small tensor. They change no result.
inline Execution& execution_for(const std::string& target, int threads) {
  thread_local std::optional<Execution> kept;
  thread_local std::string kept_target;
  if (!kept || kept_target != target || kept->threads() != threads) {
    kept = value_or_raise(Execution::create(target, threads));
    kept_target = target;
  }
  return *kept;
}

}  // namespace gradwire::python
