#pragma once

#include <cstddef>

namespace gradwire {

// Asks the system to back memory that was not touched yet with huge pages, if it is large enough to
// gain: otherwise passes over hundreds of megabytes wait for page tables.
void advise_huge_pages(void* memory, size_t bytes) noexcept;

}  // namespace gradwire
