#include <numeric>

#include "stages/trits/two_bits.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class TritSums : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(TritSums);

struct Packing {
  size_t trits_per_byte;
  uint8_t zeros;
  uint8_t (*pack)(const std::vector<int>& trits, size_t first);
  bool (*Kernels::*add)(const uint8_t* packed, size_t n, int8_t* sums);
};

int trit_or_zero(const std::vector<int>& trits, size_t i) {
  return i < trits.size() ? trits[i] : 0;
}

const std::vector<Packing> kPackings = {
    {kTritsPerByte, kZeroByte,
     [](const std::vector<int>& trits, size_t first) {
       int byte = kZeroByte;
       for (int place = 0; place < kTritsPerByte; ++place) {
         byte += trit_weight(place) * trit_or_zero(trits, first + static_cast<size_t>(place));
       }
       return static_cast<uint8_t>(byte);
     },
     &Kernels::add_trits},
    {kTwoBitTrits, 0,
     [](const std::vector<int>& trits, size_t first) {
       int byte = 0;
       for (int place = 0; place < kTwoBitTrits; ++place) {
         const int trit = trit_or_zero(trits, first + static_cast<size_t>(place));
         byte |= (trit == 0 ? 0 : trit > 0 ? 1 : 2) << 2 * place;
       }
       return static_cast<uint8_t>(byte);
     },
     &Kernels::add_two_bits},
};

std::vector<uint8_t> pack(const Packing& packing, const std::vector<int>& trits) {
  std::vector<uint8_t> packed;
  for (size_t i = 0; i < trits.size(); i += packing.trits_per_byte) {
    packed.push_back(packing.pack(trits, i));
  }
  return packed;
}

TEST_P(TritSums, AddEachTritToItsSumAndNothingElse) {
  Guarded<uint8_t> packed(11000);
  Guarded<int8_t> sums(41000);
  for (const Packing& packing : kPackings) {
    for (size_t n : lengths()) {
      const Edge edge = kEdges[n % 2];
      std::vector<int> trits;
      for (uint8_t byte : any_bytes(n, 0, 2, static_cast<uint32_t>(n))) trits.push_back(byte - 1);
      std::vector<int8_t> before(n), want(n);
      for (size_t i = 0; i < n; ++i) {
        // Sums reach the ends of the range.
        before[i] =
            static_cast<int8_t>(i % 3 == 0 ? -126 * trits[i] : static_cast<int>(i % 200) - 100);
        want[i] = static_cast<int8_t>(before[i] + trits[i]);
      }
      ASSERT_TRUE((kernels().*packing.add)(packed.take_copy(pack(packing, trits), edge), n,
                                           sums.take_copy(before, edge)))
          << n;
      ASSERT_EQ(sums.copy(), want) << n;
      ASSERT_TRUE(sums.outside_untouched()) << n;
    }
  }
}

// TritSums widens them after so many.
TEST_P(TritSums, HoldTheSumOfAllRanks) {
  constexpr size_t kValues = 1000;
  for (const Packing& packing : kPackings) {
    std::vector<int> want(kValues);
    std::vector<int8_t> sums(kValues);
    for (uint32_t rank = 0; rank < 127; ++rank) {
      std::vector<int> trits;
      for (uint8_t byte : any_bytes(kValues, 0, 2, rank)) trits.push_back(byte - 1);
      trits[0] = 1;
      trits[1] = -1;
      for (size_t i = 0; i < kValues; ++i) want[i] += trits[i];
      ASSERT_TRUE((kernels().*packing.add)(pack(packing, trits).data(), kValues, sums.data()));
    }
    EXPECT_EQ(std::vector<int>(sums.begin(), sums.end()), want);
    EXPECT_EQ(sums[0], 127);
    EXPECT_EQ(sums[1], -127);
  }
}

TEST_P(TritSums, RefuseInvalidTritsAndPadding) {
  for (const Packing& packing : kPackings) {
    for (size_t n = 1; n < 200; ++n) {
      const std::vector<uint8_t> zeros = pack(packing, std::vector<int>(n));
      std::vector<int8_t> sums(n);
      EXPECT_TRUE((kernels().*packing.add)(zeros.data(), n, sums.data()));
      for (size_t i = 0; i < zeros.size(); ++i) {
        for (int byte = 0; byte < 256; ++byte) {
          std::vector<uint8_t> bytes = zeros;
          bytes[i] = static_cast<uint8_t>(byte);
          std::vector<float> out(n);
          const bool valid =
              packing.trits_per_byte == kTritsPerByte
                  ? scalar().unpack(bytes.data(), n, 1.0f, out.data(), kStore)
                  : scalar().unpack_two_bits(bytes.data(), n, 1.0f, out.data(), kStore);
          ASSERT_EQ((kernels().*packing.add)(bytes.data(), n, sums.data()), valid)
              << n << " " << i << " " << byte;
          if (i + 2 < zeros.size()) byte += 6;  // every byte at the end, some bytes before it
        }
        std::fill(sums.begin(), sums.end(), int8_t{0});
      }
    }
  }
}

}  // namespace
}  // namespace gradwire
