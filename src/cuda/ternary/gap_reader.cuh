#pragma once

// Reading of gaps in Golomb-Rice code (spec/format.md, Coder rice). Any bytes are safe.

#include <cstdint>

#include "cuda/common/launch.h"
#include "stages/rice/rice.h"

namespace gradwire::cuda {

// Reads bits, the lowest of a byte first, in aligned words that lie within the bytes, one word
// ahead.
class BitReader {
 public:
  __device__ BitReader(const uint8_t* bytes, uint32_t size)
      : skew_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(bytes) % 4)),
        end_(skew_ + size),
        words_(bytes - skew_),
        at_hand_(uint64_t{word(0)} >> 8 * skew_),
        count_(32 - 8 * skew_),
        ahead_(word(1)),
        left_(8 * size) {}

  // The next 32 bits, with zeros after the end.
  __device__ uint32_t peek() {
    if (count_ < 32) {
      at_hand_ |= uint64_t{ahead_} << count_;
      count_ += 32;
      ahead_ = word(next_++);
    }
    return static_cast<uint32_t>(at_hand_);
  }
  // Skips at most 32 bits. Called after peek.
  __device__ void skip(uint32_t bits) {
    at_hand_ >>= bits;
    count_ -= bits;
    left_ -= bits;
  }
  __device__ uint32_t left() const { return left_; }

 private:
  __device__ uint32_t word(uint32_t index) const {
    const uint32_t first = 4 * index;
    if (first >= skew_ && first + 4 <= end_) {
      return *reinterpret_cast<const uint32_t*>(words_ + first);
    }
    uint32_t some = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      if (first + i >= skew_ && first + i < end_) some |= uint32_t{words_[first + i]} << 8 * i;
    }
    return some;
  }

  uint32_t skew_;
  uint32_t end_;
  const uint8_t* words_;  // aligned; the bytes begin `skew_` later
  uint64_t at_hand_;
  uint32_t count_;
  uint32_t ahead_;
  uint32_t next_ = 2;
  uint32_t left_;  // bits that were not skipped
};

// Reads the non-zeros of a chunk, one after the other, as each code begins where the one before
// ends.
class GapReader {
 public:
  __device__ GapReader(const uint8_t* bytes, uint32_t size, uint32_t n)
      : bits_(bytes, size), n_(n) {
    read();
  }

  // Sets the bits of the non-zeros before value `end`. The first words are those of value `begin`,
  // a multiple of 32.
  __device__ void read_until(uint32_t begin, uint32_t end, uint32_t* plus, uint32_t* minus) {
    while (at_ < end) {
      uint32_t* const signs = negative_ ? minus : plus;  // GCC 12 errs on (? :)[] under sanitizers
      atomicOr(&signs[(at_ - begin) / 32], 1u << (at_ - begin) % 32);
      read();
    }
  }
  // Whether the bytes do not stand for n trits.
  __device__ bool wrong() const { return wrong_; }

 private:
  static constexpr uint32_t kNoMore = UINT32_MAX;

  __device__ void read() {
    uint32_t bits = bits_.peek();
    // Whether only padding is left.
    const bool ended = bits_.left() < kRicePadding && bits == 0;
    if (!ended && in_group_ == 0) {
      if (bits_.left() < kRiceHeadBits) return fail();
      k_ = bits & (kRiceChoices - 1);
      bits_.skip(kRiceHeadBits);
      in_group_ = kRiceGroup;
      bits = bits_.peek();
    }
    if (ended) {
      at_ = kNoMore;
      return;
    }
    --in_group_;
    const int zeros = bits == 0 ? kRiceEscape : __ffs(static_cast<int>(bits)) - 1;
    const bool escaped = zeros >= kRiceEscape;
    const uint32_t length = escaped ? kRiceLongestCode : static_cast<uint32_t>(zeros) + 2 + k_;
    const uint32_t at_sign = escaped ? kRiceEscape : static_cast<uint32_t>(zeros) + 1;
    const uint32_t rest = bits >> at_sign >> 1;
    const uint32_t gap =
        escaped ? rest & 0xffffu : (static_cast<uint32_t>(zeros) << k_) + (rest & ((1u << k_) - 1));
    if (bits_.left() < length || gap >= n_ - next_) return fail();
    bits_.skip(length);
    negative_ = (bits >> at_sign & 1) != 0;
    at_ = next_ + gap;
    next_ = at_ + 1;
  }

  __device__ void fail() {
    wrong_ = true;
    at_ = kNoMore;
  }

  BitReader bits_;
  uint32_t n_;
  uint32_t k_ = 0;
  uint32_t in_group_ = 0;  // non-zeros that are left of the group of codes
  uint32_t at_ = 0;        // of the next non-zero, or kNoMore
  uint32_t next_ = 0;      // the value after it
  bool negative_ = false;
  bool wrong_ = false;
};

}  // namespace gradwire::cuda
