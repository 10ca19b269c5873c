#include "base/checksum.h"

#include "base/digest-inl.h"

namespace gradwire {

uint64_t digest_anywhere(const void* bytes, size_t size, const void* more,
                         size_t more_size) noexcept {
  return digest_parts(bytes, size, more, more_size);
}

uint64_t digest64(std::span<const std::byte> bytes, std::span<const std::byte> more) noexcept {
#ifdef __x86_64__
  static const auto digest = __builtin_cpu_supports("avx2") ? digest_avx2 : digest_anywhere;
#else
  constexpr auto digest = digest_anywhere;
#endif
  return digest(bytes.data(), bytes.size(), more.data(), more.size());
}

uint32_t checksum32(std::span<const std::byte> bytes, std::span<const std::byte> more) noexcept {
  return static_cast<uint32_t>(digest64(bytes, more));
}

}  // namespace gradwire
