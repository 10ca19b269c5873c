#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

struct Kernels;
class ThreadPool;

// kWhereItPays uses one thread for small tensors: below about a million values (measured) the work
// takes less time than waking another thread.
enum class Threading : uint8_t { kWhereItPays, kAlways };

// How the work of a call is done: the SIMD target and the number of threads. They never change the
// result: the bytes are the same for every target and any number of threads.
//
// One Execution serves one call at a time; make one for each thread that encodes or decodes.
class GRADWIRE_EXPORT Execution {
 public:
  // target: "auto" (the best of this CPU) or one of simd_targets(). threads: 1 to 256, including
  // the caller's own. kInvalidArgument: the message lists what is valid.
  static Result<Execution> create(std::string_view target = "auto", int threads = 1,
                                  Threading threading = Threading::kWhereItPays);

  Execution(Execution&&) noexcept;
  Execution& operator=(Execution&&) noexcept;
  ~Execution();

  [[nodiscard]] const Kernels& kernels() const noexcept { return *kernels_; }
  [[nodiscard]] std::string_view target() const noexcept;
  [[nodiscard]] int threads() const noexcept;

  // Calls body(i) once for every i in [0, count), in any order, and returns when all calls are
  // done. A call should process some 40 000 values.
  void for_each(size_t count, const std::function<void(size_t)>& body);
  // Whether for_each(count, ...) uses the caller's thread alone, and so goes in ascending order.
  [[nodiscard]] bool goes_in_order(size_t count) const noexcept;

 private:
  Execution(const Kernels* kernels, std::unique_ptr<ThreadPool> pool, Threading threading);

  const Kernels* kernels_;
  Threading threading_;
  std::unique_ptr<ThreadPool> pool_;  // null for the caller's thread alone
};

// The names of the SIMD targets of this CPU, best first, "scalar" (the definition) last.
[[nodiscard]] GRADWIRE_EXPORT std::vector<std::string_view> simd_targets();

}  // namespace gradwire
