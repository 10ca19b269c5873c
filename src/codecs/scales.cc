#include "codecs/scales.h"

#include <algorithm>
#include <string>

#include "base/endian.h"
#include "codecs/checks.h"

namespace gradwire {

Status check_scales(std::string_view name, const std::byte* scales, uint64_t count,
                    uint32_t largest) {
  bool any = false;
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t bits = load_le<uint32_t>(scales + i * sizeof(float));
    if (bits >= kNonFiniteBits) {
      return corrupt_payload(name, "scale " + std::to_string(i) + " is negative, infinite or NaN");
    }
    if (bits > largest) {
      return corrupt_payload(
          name, "scale " + std::to_string(i) + " makes values beyond the largest float32");
    }
    any |= bits != 0;
  }
  return any ? Status() : corrupt_payload(name, "all scales are 0, which has an empty payload");
}

bool all_zero(const std::byte* scales, uint64_t count) {
  return std::all_of(scales, scales + count * sizeof(float),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace gradwire
