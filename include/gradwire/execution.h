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

// Small tensors take less time than waking a thread does (measured: below a million values).
enum class Threading : uint8_t { kWhereItPays, kAlways };

// How the work of a call is done: which SIMD target and how many threads. Never what comes out: the
// bytes are the same for every target and any number of threads.
//
// One Execution serves one call at a time; make one for each thread that encodes or decodes.
class GRADWIRE_EXPORT Execution {
 public:
  // target: "auto" (the best that this CPU has) or one of simd_targets(). threads: 1 to 256, the
  // caller's own thread among them. kInvalidArgument names what there is.
  static Result<Execution> create(std::string_view target = "auto", int threads = 1,
                                  Threading threading = Threading::kWhereItPays);

  Execution(Execution&&) noexcept;
  Execution& operator=(Execution&&) noexcept;
  ~Execution();

  [[nodiscard]] const Kernels& kernels() const noexcept { return *kernels_; }
  [[nodiscard]] std::string_view target() const noexcept;
  [[nodiscard]] int threads() const noexcept;

  // Calls body(i) once for every i in [0, count), in no order, and returns when all are done. A
  // call should be the work of some 40 000 values.
  void for_each(size_t count, const std::function<void(size_t)>& body);
  // Whether for_each(count, ...) keeps to the caller's thread, and goes in ascending order.
  [[nodiscard]] bool goes_in_order(size_t count) const noexcept;

 private:
  Execution(const Kernels* kernels, std::unique_ptr<ThreadPool> pool, Threading threading);

  const Kernels* kernels_;
  Threading threading_;
  std::unique_ptr<ThreadPool> pool_;  // null: the caller's thread alone
};

// Names of what this CPU can run, best first, "scalar" (the definition) last.
[[nodiscard]] GRADWIRE_EXPORT std::vector<std::string_view> simd_targets();

}  // namespace gradwire
