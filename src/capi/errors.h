#pragma once

// From Status and exceptions to gw_status and this thread's message. Inline and over the public
// gw_set_last_error alone, so that libraries on top of libgradwire can use it.

#include <cstdio>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>

#include "gradwire/gradwire.h"
#include "gradwire/status.h"

namespace gradwire::capi {

// An argument that must not be NULL. Where there are no values, there need be no pointer.
struct Argument {
  const char* name;
  const void* pointer;
  uint64_t n = 1;
};

// kInvalidArgument naming the first that is NULL.
inline Status check_given(std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    if (argument.pointer == nullptr && argument.n > 0) {
      return {StatusCode::kInvalidArgument, std::string(argument.name) + " is NULL"};
    }
  }
  return {};
}

// What call(), a Status, comes to in C, once the arguments are checked. No exception passes.
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
