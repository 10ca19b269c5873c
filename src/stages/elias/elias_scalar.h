#pragma once

// The scalar kernels of Elias coding. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/elias/elias.h"

namespace gradwire::scalar {

class EliasWriter {
 public:
  explicit EliasWriter(uint8_t* out) : out_(out) {}

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

// Reads zeros after the end.
class EliasReader {
 public:
  EliasReader(const uint8_t* coded, size_t size) : coded_(coded), size_(size) {}

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

  // Whether less than a byte is left, and all of it zeros.
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

inline int8_t with_sign(uint32_t magnitude, uint32_t sign) {
  const auto level = static_cast<int>(magnitude);
  return static_cast<int8_t>(sign != 0 ? -level : level);
}

inline size_t encode_sparse_levels(const int8_t* levels, size_t n, uint8_t* out) {
  EliasWriter writer(out);
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

inline size_t encode_dense_levels(const int8_t* levels, size_t n, uint8_t* out) {
  EliasWriter writer(out);
  for (size_t i = 0; i < n; ++i) writer.put(dense_level_code(levels[i]));
  return writer.size();
}

inline bool decode_sparse_levels(const uint8_t* coded, size_t size, size_t n, int32_t s,
                                 int8_t* levels) {
  std::fill(levels, levels + n, int8_t{0});
  EliasReader reader(coded, size);
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

inline bool decode_dense_levels(const uint8_t* coded, size_t size, size_t n, int32_t s,
                                int8_t* levels) {
  EliasReader reader(coded, size);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t number = reader.number();
    if (number == 0 || number > static_cast<uint32_t>(s) + 1) return false;
    levels[i] = with_sign(number - 1, number > 1 ? reader.bit() : 0);
  }
  return reader.at_end();
}

}  // namespace gradwire::scalar
