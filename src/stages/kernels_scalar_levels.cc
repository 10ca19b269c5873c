#include "stages/kernels_scalar_levels.h"

#include <algorithm>

#include "stages/elias.h"

namespace gradwire::scalar {
namespace {

class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}

  void put(BitCode code) {
    for (int i = code.length - 1; i >= 0; --i, ++at_) {
      if (at_ % 8 == 0) out_[at_ / 8] = 0;
      const uint64_t bit = code.bits >> i & 1;
      out_[at_ / 8] = static_cast<uint8_t>(out_[at_ / 8] | bit << (7 - at_ % 8));
    }
  }

  [[nodiscard]] size_t size() const { return (at_ + 7) / 8; }

 private:
  uint8_t* out_;
  size_t at_ = 0;
};

// Behind the end it reads zeros.
class BitReader {
 public:
  BitReader(const uint8_t* coded, size_t size) : coded_(coded), size_(size) {}

  uint32_t bit() {
    const uint32_t value = at_ / 8 < size_ ? coded_[at_ / 8] >> (7 - at_ % 8) & 1u : 0;
    ++at_;
    return value;
  }

  // 0: the number is kEliasLimit or more.
  uint32_t number() {
    uint64_t window = 0;
    const size_t start = at_;
    for (int i = 0; i < 64; ++i) window = window << 1 | bit();
    const EliasNumber number = elias_read(window);
    at_ = start + static_cast<size_t>(number.length);
    return number.value;
  }

  // Whether it has come to the end: less than a byte is left, and zeros.
  [[nodiscard]] bool at_end() {
    if ((at_ + 7) / 8 != size_) return false;
    while (at_ % 8 != 0) {
      if (bit() != 0) return false;
    }
    return true;
  }

 private:
  const uint8_t* coded_;
  size_t size_;
  size_t at_ = 0;
};

int8_t with_sign(uint32_t magnitude, uint32_t sign) {
  const auto level = static_cast<int>(magnitude);
  return static_cast<int8_t>(sign != 0 ? -level : level);
}

}  // namespace

void quantize_levels(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                     int8_t* levels) {
  for (size_t i = 0; i < n; ++i) {
    levels[i] = static_cast<int8_t>(level_of(x[i], scale, words[i]));
  }
}

void scale_levels(const int8_t* levels, size_t n, float unit, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = level_value(levels[i], unit);
}

void scale_add_levels(const int8_t* levels, size_t n, float unit, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] += level_value(levels[i], unit);
}

void pack_levels(const int8_t* levels, size_t n, int32_t s, uint8_t* packed) {
  const int width = level_width(s);
  uint32_t bits = 0;
  int filled = 0;
  for (size_t i = 0; i < n; ++i) {
    bits |= static_cast<uint32_t>(levels[i] + s) << filled;
    for (filled += width; filled >= 8; filled -= 8, bits >>= 8) {
      *packed++ = static_cast<uint8_t>(bits);
    }
  }
  if (filled > 0) *packed = static_cast<uint8_t>(bits);
}

bool unpack_levels(const uint8_t* packed, size_t n, int32_t s, int8_t* levels) {
  const int width = level_width(s);
  uint32_t bits = 0;
  int filled = 0;
  for (size_t i = 0; i < n; ++i) {
    if (filled < width) {
      bits |= static_cast<uint32_t>(*packed++) << filled;
      filled += 8;
    }
    const auto code = static_cast<int32_t>(bits & ((1u << width) - 1));
    if (code > 2 * s) return false;
    levels[i] = static_cast<int8_t>(code - s);
    bits >>= width;
    filled -= width;
  }
  return bits == 0;
}

size_t encode_sparse_levels(const int8_t* levels, size_t n, uint8_t* out) {
  BitWriter writer(out);
  uint32_t distance = 0;
  for (size_t i = 0; i < n; ++i) {
    ++distance;
    if (levels[i] == 0) continue;
    writer.put(elias_code(distance));
    writer.put(sparse_level_code(levels[i]));
    distance = 0;
  }
  writer.put(elias_code(distance + 1));
  return writer.size();
}

size_t encode_dense_levels(const int8_t* levels, size_t n, uint8_t* out) {
  BitWriter writer(out);
  for (size_t i = 0; i < n; ++i) writer.put(dense_level_code(levels[i]));
  return writer.size();
}

bool decode_sparse_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels) {
  std::fill(levels, levels + n, int8_t{0});
  BitReader reader(coded, size);
  for (size_t i = 0;;) {
    const uint32_t distance = reader.number();
    if (distance == 0 || distance > n + 1 - i) return false;
    i += distance;
    if (i > n) return reader.at_end();
    const uint32_t sign = reader.bit();
    const uint32_t magnitude = reader.number();
    if (magnitude == 0 || magnitude > static_cast<uint32_t>(s)) return false;
    levels[i - 1] = with_sign(magnitude, sign);
  }
}

bool decode_dense_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels) {
  BitReader reader(coded, size);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t number = reader.number();
    if (number == 0 || number > static_cast<uint32_t>(s) + 1) return false;
    levels[i] = with_sign(number - 1, number > 1 ? reader.bit() : 0);
  }
  return reader.at_end();
}

}  // namespace gradwire::scalar
