#include "base/checksum.h"

// The header-only form: the streaming state lives on the stack and no shared library is needed.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace gradwire {

uint64_t digest64(std::initializer_list<std::span<const std::byte>> parts) noexcept {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::span<const std::byte> part : parts) {
    if (!part.empty()) XXH3_64bits_update(&state, part.data(), part.size());
  }
  return XXH3_64bits_digest(&state);
}

uint32_t checksum32(std::initializer_list<std::span<const std::byte>> parts) noexcept {
  return static_cast<uint32_t>(digest64(parts));
}

}  // namespace gradwire
