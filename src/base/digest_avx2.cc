// Compiled with -mavx2 (CMakeLists.txt); empty for other architectures.
#ifdef __x86_64__
#ifndef __AVX2__
#error "digest_avx2.cc must be compiled with -mavx2"
#endif

#include "base/digest-inl.h"

namespace gradwire {

uint64_t digest_avx2(const void* bytes, size_t size, const void* more, size_t more_size) noexcept {
  return digest_parts(bytes, size, more, more_size);
}

}  // namespace gradwire
#endif
