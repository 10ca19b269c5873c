#pragma once

#include <cstddef>

namespace gradwire {

// Asks the system to back memory with huge pages if it is large enough to gain from them. Without
// them, passes over hundreds of megabytes wait for page tables. Call it before the memory is used.
void advise_huge_pages(void* memory, size_t bytes) noexcept;

}  // namespace gradwire
