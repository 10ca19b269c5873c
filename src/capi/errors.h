#pragma once

// Turns Status and exceptions into gw_status and this thread's message. The functions are inline
// and use only the public gw_set_last_error, so that libraries on top of libgradwire can use them.

#include <cstdio>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>

#include "gradwire/gradwire.h"
#include "gradwire/status.h"

namespace gradwire::capi {

// An argument that must not be NULL, unless n, the number of its values, is 0.
struct Argument {
  const char* name;
  const void* pointer;
  uint64_t n = 1;
};

// kInvalidArgument, naming the first argument that is NULL.
inline Status check_given(std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    if (argument.pointer == nullptr && argument.n > 0) {
      return {StatusCode::kInvalidArgument, std::string(argument.name) + " is NULL"};
    }
  }
  return {};
}

// Checks the arguments, runs call(), which returns a Status, and turns it into a gw_status. It
// catches all exceptions.
template <typename Call>
gw_status guarded(std::initializer_list<Argument> arguments, const Call& call) noexcept {
  try {
    Status status = check_given(arguments);
    if (status.ok()) status = call();
    return gw_set_last_error(static_cast<gw_status>(status.code()), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return gw_set_last_error(GW_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    char message[200];
    std::snprintf(message, sizeof message, "an exception that should not have left gradwire: %s",
                  error.what());
    return gw_set_last_error(GW_INTERNAL_ERROR, message);
  } catch (...) {
    return gw_set_last_error(GW_INTERNAL_ERROR, "an exception of unknown type left gradwire");
  }
}

}  // namespace gradwire::capi
