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
constexpr int kMostBits = 56;  // from one flush or fill to the next

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
RiceCode gap_code(uint32_t gap, int k) {
  const uint32_t quotient = gap >> k;
  if (quotient >= kRiceEscape) return {gap << kRiceEscape, kRiceEscape + kRiceGapBits};
  const uint32_t low = gap - (quotient << k);
  return {(low << 1 | 1) << quotient, gap_length(gap, k)};
}

// Values of which most are small and are counted.
template <typename T>
class Tally {
 public:
  explicit Tally(std::span<const T> values) : values_(values) {
    // Neighbours are mostly equal; they count in different places.
    uint32_t parts[4][kCounted + 1] = {};
    for (size_t i = 0; i < values.size(); ++i) ++parts[i % 4][std::min<T>(values[i], kCounted)];
    for (const auto& part : parts) {
      for (size_t value = 0; value <= kCounted; ++value) of_[value] += part[value];
    }
  }
  template <typename Length>
  [[nodiscard]] uint64_t total_length(int k, uint32_t least, const Length& length) const {
    uint64_t bits = 0;
    for (uint32_t value = least; value < kCounted; ++value) {
      bits += uint64_t{of_[value]} * static_cast<uint64_t>(length(value, k));
    }
    if (of_[kCounted] == 0) return bits;
    for (const T value : values_) {
      if (value >= kCounted) bits += static_cast<uint64_t>(length(value, k));
    }
    return bits;
  }

 private:
  static constexpr uint32_t kCounted = 64;

  std::span<const T> values_;
  uint32_t of_[kCounted + 1] = {};
};

// The best of the parameters up to the bits of the values' mean.
template <typename T, typename Length>
std::pair<int, uint64_t> choose_k(std::span<const T> values, uint32_t least, const Length& length) {
  uint64_t sum = 0;
  for (const T value : values) sum += value - least;
  const int most = std::min(kLargestK, static_cast<int>(std::bit_width(sum / values.size())));
  const Tally<T> tally(values);
  std::pair<int, uint64_t> best{0, UINT64_MAX};
  for (int k = std::max(0, most - 5); k <= most; ++k) {
    const uint64_t bits = tally.total_length(k, least, length);
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
  // Reads a gap and a size if they are short and not at the end of the bytes. false: nothing was
  // read.
  bool take_short(int gap_k, int size_k, uint16_t& gap, uint32_t& size) {
    if (!reader.has_word()) return false;
    reader.fill();
    const int zeros = std::countr_zero(reader.bits);
    const int gap_length = zeros + 1 + gap_k;
    if (zeros >= kRiceEscape) return false;
    const uint64_t rest = reader.bits >> gap_length;
    const int size_zeros = std::countr_zero(rest | uint64_t{1} << 31);
    const int size_bits = size_zeros + size_k;
    if (size_bits > 31 || gap_length + size_zeros + 1 + size_bits > kMostBits) return false;
    const auto low_of = [](uint64_t bits, int length) {
      return bits & ((uint64_t{1} << length) - 1);
    };
    const uint64_t gap_low = low_of(reader.bits >> (zeros + 1), gap_k);
    const uint64_t whole_gap = (static_cast<uint64_t>(zeros) << gap_k) + gap_low;
    if (whole_gap > UINT16_MAX) return false;
    gap = static_cast<uint16_t>(whole_gap);
    const uint64_t low = low_of(rest >> (size_zeros + 1), size_bits);
    size = static_cast<uint32_t>((low | uint64_t{1} << size_bits) - (uint64_t{1} << size_k) +
                                 kSmallestFar);
    reader.drop(gap_length + size_zeros + 1 + size_bits);
    return true;
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
    const RiceCode gap = gap_code(far.gaps[i], code.gap_k);
    const SizeCode size(far.sizes[i], code.size_k);
    const uint64_t low = size.v & ((uint64_t{1} << size.low_bits) - 1);
    const uint64_t rest = low << 1 | 1;
    writer.put(0, gap.bits, static_cast<uint32_t>(gap.length));
    if (gap.length + size.length() <= kMostBits) {
      writer.put(static_cast<uint32_t>(size.zeros), rest, static_cast<uint32_t>(size.length()));
    } else {
      writer.flush();
      writer.put(static_cast<uint32_t>(size.zeros), 1, static_cast<uint32_t>(size.zeros) + 1);
      writer.flush();
      writer.put(0, low, static_cast<uint32_t>(size.low_bits));
    }
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
    if (reader.take_short(gap_k, size_k, far.gaps[i], far.sizes[i])) {
      if (before + far.gaps[i] >= most || far.sizes[i] > largest) return 0;
      before += far.gaps[i] + 1u;
      continue;
    }
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
