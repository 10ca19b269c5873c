#include "codecs/ternary.h"

#include <algorithm>
#include <bit>

#include "stages/trits/trit.h"
#include "stages/trits/two_bits.h"
#include "stages/zero_run/zero_run.h"

namespace gradwire {
namespace {

// Bytes that n coded trits take.
ChunkSize coded_size(TernaryCoder coder, uint64_t n) {
  const uint64_t packed = packed_size(n);
  switch (coder) {
    case TernaryCoder::kNone:
      return packed;
    case TernaryCoder::kZeroRun:
      return {(packed + kLongestRun - 1) / kLongestRun, packed};
    case TernaryCoder::kRice:
      return {0, packed};
    case TernaryCoder::kTwoBit:
      return two_bit_size(n);
  }
  return packed;
}

// Stores or adds the values of trits `first` to `first` + n - 1.
void unpack_bits(const TritBits& trits, uint64_t first, uint64_t n, float m, float* out,
                 DecodeMode mode) {
  if (mode == DecodeMode::kStore) std::fill_n(out, n, 0.0f);
  for (uint64_t word = first / kWordBits; word * kWordBits < first + n; ++word) {
    const uint64_t begin = word * kWordBits;
    uint64_t any = trits.plus[word] | trits.minus[word];
    if (begin < first) any &= ~uint64_t{0} << (first - begin);
    if (first + n - begin < kWordBits) any &= (uint64_t{1} << (first + n - begin)) - 1;
    for (; any != 0; any &= any - 1) {
      const int bit = std::countr_zero(any);
      const int trit = (trits.minus[word] >> bit & 1) != 0 ? -1 : 1;
      float& value = out[begin + static_cast<uint64_t>(bit) - first];
      value =
          mode == DecodeMode::kStore ? ternary_value(trit, m) : ternary_accumulate(value, trit, m);
    }
  }
}

}  // namespace

void TritBits::append(uint64_t at, const TritBits& trits, uint64_t n) {
  const uint64_t shift = at % kWordBits;
  const auto shifted_in = [&](uint64_t* words, const uint64_t* more) {
    words += at / kWordBits;
    for (uint64_t i = 0; i < trit_words(n); ++i) {
      words[i] = shift == 0 ? more[i] : words[i] | more[i] << shift;
      if (shift != 0 && i * kWordBits + kWordBits - shift < n) {
        words[i + 1] = more[i] >> (kWordBits - shift);
      }
    }
  };
  shifted_in(plus, trits.plus);
  shifted_in(minus, trits.minus);
}

uint64_t code_trits(TernaryCoder coder, const TritBits& trits, uint64_t n, uint8_t* slot,
                    const Kernels& kernels) {
  switch (coder) {
    case TernaryCoder::kNone:
      kernels.pack_trits(trits.plus, trits.minus, n, slot);
      return packed_size(n);
    case TernaryCoder::kZeroRun: {
      alignas(64) uint8_t packed[kChunkValues / kTritsPerByte];
      kernels.pack_trits(trits.plus, trits.minus, n, packed);
      return kernels.zero_run_encode(packed, packed_size(n), slot);
    }
    case TernaryCoder::kRice:
      return kernels.rice_encode(trits.plus, trits.minus, n, slot);
    case TernaryCoder::kTwoBit:
      kernels.pack_two_bits(trits.plus, trits.minus, n, slot);
      return two_bit_size(n);
  }
  return 0;
}

TernaryShape::TernaryShape(uint64_t n, TernaryCoder ternary_coder, uint64_t group_size)
    : ChunkedShape(Groups(n, group_size), sizeof(float),
                   [=](uint64_t values) { return coded_size(ternary_coder, values); }),
      coder(ternary_coder) {}

bool decode_trits(TernaryCoder coder, const Decoding& decoding, uint64_t chunk,
                  std::span<const uint8_t> bytes, float* out) {
  const Kernels& kernels = decoding.kernels;
  const uint64_t n = decoding.shape.chunks.values(chunk);
  const bool one_scale = decoding.shape.groups.count == 1;
  if (coder == TernaryCoder::kZeroRun && one_scale) {
    return kernels.zero_run_unpack(bytes.data(), bytes.size(), n, decoding.scale(0), out,
                                   decoding.mode);
  }
  if (coder == TernaryCoder::kRice && one_scale) {
    return kernels.rice_unpack(bytes.data(), bytes.size(), n, decoding.scale(0), out,
                               decoding.mode);
  }
  if (coder == TernaryCoder::kRice) {
    TritBits trits;
    if (!kernels.rice_decode(bytes.data(), bytes.size(), n, trits.plus, trits.minus)) return false;
    decoding.shape.for_each_piece(chunk, [&](uint64_t group, uint64_t at, uint64_t count) {
      unpack_bits(trits, at, count, decoding.scale(group), out + at, decoding.mode);
    });
    return true;
  }
  alignas(64) uint8_t buffer[kChunkValues / kTritsPerByte];
  const uint8_t* packed = bytes.data();
  if (coder == TernaryCoder::kZeroRun) {
    if (!kernels.zero_run_decode(bytes.data(), bytes.size(), buffer, packed_size(n))) return false;
    packed = buffer;
  }
  const bool two_bits = coder == TernaryCoder::kTwoBit;
  const uint64_t values_a_byte = two_bits ? kTwoBitTrits : kTritsPerByte;
  const auto unpack = two_bits ? kernels.unpack_two_bits : kernels.unpack;
  bool valid = true;
  decoding.shape.for_each_piece(chunk, [&](uint64_t group, uint64_t at, uint64_t count) {
    valid = valid && unpack(packed + at / values_a_byte, count, decoding.scale(group), out + at,
                            decoding.mode);
  });
  return valid;
}

}  // namespace gradwire
