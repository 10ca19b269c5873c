#pragma once

// From Status and exceptions to gw_status and this thread's message.

#include <exception>
#include <new>
#include <string>

#include "gradwire/gradwire.h"
#include "gradwire/status.h"

namespace gradwire::capi {

// The code of `status`; its message is what gw_last_error_message gives, unless it is ok.
gw_status report(const Status& status) noexcept;
gw_status report_out_of_memory() noexcept;
gw_status report_defect(const char* what) noexcept;

// What call(), a Status, comes to in C. No exception passes.
template <typename Call>
gw_status guarded(const Call& call) noexcept {
  try {
    return report(call());
  } catch (const std::bad_alloc&) {
    return report_out_of_memory();
  } catch (const std::exception& error) {
    return report_defect(error.what());
  } catch (...) {
    return report_defect("an exception of unknown type");
  }
}

// kInvalidArgument naming the argument.
inline Status check_given(const char* name, const void* pointer) {
  if (pointer != nullptr) return {};
  return {StatusCode::kInvalidArgument, std::string(name) + " is NULL"};
}

// As check_given, but where there are no values there need be no pointer.
inline Status check_values(const char* name, const void* pointer, uint64_t n) {
  return n == 0 ? Status() : check_given(name, pointer);
}

// kInvalidArgument unless index < count.
inline Status check_index(size_t index, size_t count) {
  if (index < count) return {};
  return {StatusCode::kInvalidArgument, "index " + std::to_string(index) + " is not below the " +
                                            std::to_string(count) + " that there are"};
}

}  // namespace gradwire::capi
