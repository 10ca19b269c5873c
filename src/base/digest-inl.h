// The digest for the instruction set that the including file is compiled for.
#pragma once

// The header-only form of xxHash: the streaming state is on the stack, and no library is needed.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/digest.h"

namespace gradwire {

static inline uint64_t digest_parts(const void* bytes, size_t size, const void* more,
                                    size_t more_size) noexcept {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  if (size != 0) XXH3_64bits_update(&state, bytes, size);
  if (more_size != 0) XXH3_64bits_update(&state, more, more_size);
  return XXH3_64bits_digest(&state);
}

}  // namespace gradwire
