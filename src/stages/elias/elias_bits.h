#pragma once

// Writes and reads Elias codes through 64 bits at a time. Kernels of every target use these
// classes, so all of them are inlined and compiled for the target.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/base.h"

#include "stages/elias/elias.h"

namespace gradwire {

// The first byte is the highest.
HWY_INLINE uint64_t big_endian(uint64_t bytes) { return __builtin_bswap64(bytes); }

// Writes eight bytes at a time, and no byte after the last.
class EliasWriter {
 public:
  HWY_INLINE explicit EliasWriter(uint8_t* out) : begin_(out), out_(out) {}

  HWY_INLINE void put(BitCode code) {
    if (code.length < free_) {
      bits_ = bits_ << code.length | code.bits;
      free_ -= code.length;
      return;
    }
    const int left = code.length - free_;
    store(bits_ << free_ | code.bits >> left);
    out_ += 8;
    bits_ = code.bits;  // the stored bits are shifted out
    free_ = 64 - left;
  }

  HWY_INLINE size_t finish() {
    const size_t bytes = static_cast<size_t>(64 - free_ + 7) / 8;
    if (bytes != 0) {
      const uint64_t last = big_endian(bits_ << free_);
      std::memcpy(out_, &last, bytes);
    }
    return static_cast<size_t>(out_ - begin_) + bytes;
  }

 private:
  HWY_INLINE void store(uint64_t bits) {
    const uint64_t bytes = big_endian(bits);
    std::memcpy(out_, &bytes, sizeof bytes);
  }

  uint8_t* begin_;
  uint8_t* out_;
  uint64_t bits_ = 0;  // the bits that are not stored yet, at the lower end
  int free_ = 64;      // above 0
};

// Reads any number of bits; after the end, it reads zeros.
class EliasReader {
 public:
  HWY_INLINE EliasReader(const uint8_t* coded, size_t size) : coded_(coded), size_(size) {}

  // The next 57 bits or more, from the highest on.
  HWY_INLINE uint64_t window() const {
    const size_t byte = at_ / 8;
    uint64_t bytes = 0;
    if (HWY_LIKELY(byte + 8 <= size_)) {
      std::memcpy(&bytes, coded_ + byte, sizeof bytes);
    } else if (byte < size_) {
      std::memcpy(&bytes, coded_ + byte, size_ - byte);
    }
    return big_endian(bytes) << at_ % 8;
  }

  HWY_INLINE void skip(int bits) { at_ += static_cast<size_t>(bits); }

  // Whether fewer than 8 bits are left, all of them 0.
  HWY_INLINE bool at_end() const {
    return (at_ + 7) / 8 == size_ && (at_ % 8 == 0 || window() == 0);
  }

 private:
  const uint8_t* coded_;
  size_t size_;
  size_t at_ = 0;
};

}  // namespace gradwire
