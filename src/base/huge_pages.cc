#include "base/huge_pages.h"

#include <cstdint>

#include <sys/mman.h>

namespace gradwire {

void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) noexcept {
#if defined(MADV_HUGEPAGE)
  constexpr size_t kWorthIt = size_t{4} << 20;
  constexpr uintptr_t kPageSize = 4096;
  if (bytes < kWorthIt) return;
  // The advice begins at the first whole page.
  const size_t before = kPageSize - reinterpret_cast<uintptr_t>(memory) % kPageSize;
  // If the system ignores this advice, everything still works.
  (void)madvise(static_cast<std::byte*>(memory) + before, (bytes - before) / kPageSize * kPageSize,
                MADV_HUGEPAGE);
#endif
}

}  // namespace gradwire
