#include "base/checksum.h"

#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "gtest/gtest.h"

#include "base/digest.h"

namespace gradwire {
namespace {

TEST(Checksum, EveryInstructionSetGivesTheDigestOfXxhash) {
  std::vector<std::byte> bytes(100'000);
  uint32_t random = 1;
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((random = random * 69069 + 1) >> 24);
  for (size_t size : {0, 1, 3, 16, 17, 128, 240, 241, 1024, 4096, 100'000}) {
    const uint64_t expected = XXH3_64bits(bytes.data(), size);
    for (size_t first : {size_t{0}, size / 3, size}) {
      const std::span<const std::byte> all(bytes.data(), size);
      EXPECT_EQ(digest64(all.first(first), all.subspan(first)), expected) << size << " " << first;
      EXPECT_EQ(digest_anywhere(all.data(), first, all.data() + first, size - first), expected);
    }
    EXPECT_EQ(checksum32(std::span(bytes).first(size), {}), static_cast<uint32_t>(expected));
  }
}

}  // namespace
}  // namespace gradwire
