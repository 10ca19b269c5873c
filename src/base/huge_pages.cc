#include "base/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace gradwire {
namespace {

constexpr size_t kWorthIt = size_t{4} << 20;
constexpr uintptr_t kPageSize = 4096;

}  // namespace

void advise_huge_pages(void* memory, size_t bytes) noexcept {
#if defined(MADV_HUGEPAGE)
  if (bytes < kWorthIt) return;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kPageSize - 1) / kPageSize * kPageSize;
  const uintptr_t last = (begin + bytes) / kPageSize * kPageSize;
  // Advice only: where it is not taken, everything works as before.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace gradwire
