#include "delta/far_steps.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <span>

#include "delta/varint.h"
#include "stages/rice/rice.h"
#include "stages/rice/rice_bits.h"

namespace gradwire {
namespace {

constexpr int kLargestK = 15;
constexpr uint32_t kSmallestFar = 2;

// Exp-Golomb code of order k: v = size - 2 + 2^k has some zeros fewer than its bits, then a 1, then
// the bits of v without its highest.
struct SizeCode {
  uint64_t v;
  int zeros;
  int low_bits;

  SizeCode(uint32_t size, int k)
      : v(size - kSmallestFar + (uint64_t{1} << k)),
        zeros(static_cast<int>(std::bit_width(v)) - 1 - k),
        low_bits(static_cast<int>(std::bit_width(v)) - 1) {}
  [[nodiscard]] int length() const { return zeros + 1 + low_bits; }
};

// A gap has no sign: its code is that of a rice code without the sign bit.
int gap_length(uint32_t gap, int k) { return rice_length(gap, k) - 1; }

template <typename T, typename Length>
uint64_t total_length(std::span<const T> values, int k, const Length& length) {
  uint64_t bits = 0;
  for (const T value : values) bits += static_cast<uint64_t>(length(value, k));
  return bits;
}

// The best of the parameters up to the bits of the values' mean.
template <typename T, typename Length>
std::pair<int, uint64_t> choose_k(std::span<const T> values, uint32_t least, const Length& length) {
  uint64_t sum = 0;
  for (const T value : values) sum += value - least;
  const int most = std::min(kLargestK, static_cast<int>(std::bit_width(sum / values.size())));
  std::pair<int, uint64_t> best{0, UINT64_MAX};
  for (int k = std::max(0, most - 5); k <= most; ++k) {
    const uint64_t bits = total_length(values, k, length);
    if (bits < best.second) best = {k, bits};
  }
  return best;
}

// Reads bits, with checks.
struct CheckedReader {
  RiceReader reader;

  // Whether `length` <= 56 bits are there.
  bool has(int length) {
    if (reader.held < length) reader.fill_to_end();
    return reader.held >= length;
  }
  std::optional<uint64_t> take(int length) {
    if (!has(length)) return std::nullopt;
    const uint64_t value = reader.bits & ((uint64_t{1} << length) - 1);
    reader.drop(length);
    return value;
  }
  // Zeros before a 1, at most `most`, and the 1.
  std::optional<int> take_zeros(int most) {
    reader.fill_to_end();
    const int zeros = std::countr_zero(reader.bits | uint64_t{1} << 63);
    if (zeros > most || zeros >= reader.held) return std::nullopt;
    reader.drop(zeros + 1);
    return zeros;
  }
};

std::optional<uint64_t> read_gap(CheckedReader& reader, int k) {
  reader.reader.fill_to_end();
  const int zeros = std::countr_zero(reader.reader.bits | uint64_t{1} << kRiceEscape);
  if (zeros == kRiceEscape) {
    if (!reader.take(kRiceEscape)) return std::nullopt;
    return reader.take(kRiceGapBits);
  }
  if (!reader.take(zeros + 1)) return std::nullopt;
  const auto low = reader.take(k);
  if (!low) return std::nullopt;
  return (static_cast<uint64_t>(zeros) << k) + *low;
}

std::optional<uint64_t> read_size(CheckedReader& reader, int k) {
  const auto zeros = reader.take_zeros(31 - k);
  if (!zeros) return std::nullopt;
  const auto low = reader.take(*zeros + k);
  if (!low) return std::nullopt;
  return (*low | uint64_t{1} << (*zeros + k)) - (uint64_t{1} << k) + kSmallestFar;
}

}  // namespace

FarCode choose_far_code(const FarSteps& far) {
  uint8_t count[kLongestVarint];
  const auto head =
      static_cast<uint64_t>(write_varint(static_cast<uint32_t>(far.count), count) - count);
  if (far.count == 0) return {.bytes = head};
  const auto [gap_k, gap_bits] = choose_k(std::span(far.gaps, far.count), 0, gap_length);
  const auto [size_k, size_bits] =
      choose_k(std::span(far.sizes, far.count), kSmallestFar,
               [](uint32_t size, int k) { return SizeCode(size, k).length(); });
  return {gap_k, size_k, head + 1 + (gap_bits + size_bits + 7) / 8};
}

uint8_t* write_far_steps(const FarSteps& far, const FarCode& code, uint8_t* out) {
  out = write_varint(static_cast<uint32_t>(far.count), out);
  if (far.count == 0) return out;
  *out++ = static_cast<uint8_t>(code.gap_k | code.size_k << 4);
  RiceWriter writer{out};
  for (size_t i = 0; i < far.count; ++i) {
    const uint32_t gap = far.gaps[i];
    const uint32_t quotient = gap >> code.gap_k;
    if (quotient < kRiceEscape) {
      const uint64_t low = gap - (quotient << code.gap_k);
      writer.put(quotient, low << 1 | 1, quotient + 1 + static_cast<uint32_t>(code.gap_k));
    } else {
      writer.put(kRiceEscape, gap, kRiceEscape + kRiceGapBits);
    }
    writer.flush();
    const SizeCode size(far.sizes[i], code.size_k);
    writer.put(static_cast<uint32_t>(size.zeros), 1, static_cast<uint32_t>(size.zeros) + 1);
    writer.flush();
    const uint64_t low = size.v & ((uint64_t{1} << size.low_bits) - 1);
    writer.put(0, low, static_cast<uint32_t>(size.low_bits));
    writer.flush();
  }
  return writer.out + (writer.held != 0 ? 1 : 0);
}

size_t read_far_steps(const uint8_t* bytes, size_t size, size_t most, uint32_t largest,
                      FarSteps& far) {
  const uint8_t* at = bytes;
  const uint8_t* end = bytes + size;
  const auto count = read_varint(at, end);
  if (!count || *count > FarSteps::kMost) return 0;
  far.count = *count;
  if (far.count == 0) return static_cast<size_t>(at - bytes);
  if (at == end) return 0;
  const int gap_k = *at & 15;
  const int size_k = *at >> 4;
  CheckedReader reader{{at + 1, end}};
  uint64_t before = 0;
  for (size_t i = 0; i < far.count; ++i) {
    const auto gap = read_gap(reader, gap_k);
    if (!gap || before + *gap >= most) return 0;
    const auto step = read_size(reader, size_k);
    if (!step || *step > largest) return 0;
    far.gaps[i] = static_cast<uint16_t>(*gap);
    far.sizes[i] = static_cast<uint32_t>(*step);
    before += *gap + 1;
  }
  const int padding = reader.reader.held % 8;
  if ((reader.reader.bits & ((uint64_t{1} << padding) - 1)) != 0) return 0;
  return static_cast<size_t>(reader.reader.next - bytes) -
         static_cast<size_t>(reader.reader.held / 8);
}

}  // namespace gradwire
