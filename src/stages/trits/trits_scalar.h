#pragma once

// The scalar kernels of packed trits. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"
#include "stages/trits/two_bits.h"

namespace gradwire::scalar {

inline void put_trit(StoreTo to, size_t i, int trit, float m) {
  to.out[i] = ternary_value(trit, m);
}

inline void put_trit(AddTo to, size_t i, int trit, float m) {
  to.out[i] = ternary_accumulate(to.out[i], trit, m);
}

// Calls put(value index, trit) for the trits of packed byte i; false if the byte is invalid.
template <typename Put>
bool unpack_byte(uint8_t byte, size_t i, size_t n, const Put& put) {
  if (byte > kLargestPackedByte) return false;
  for (int place = 0; place < kTritsPerByte; ++place) {
    const size_t at = i * kTritsPerByte + static_cast<size_t>(place);
    const int trit = trit_at(byte, place);
    if (at < n) {
      put(at, trit);
    } else if (trit != 0) {
      return false;
    }
  }
  return true;
}

template <typename Put>
bool unpack_each(const uint8_t* packed, size_t n, const Put& put) {
  for (size_t i = 0; i < packed_size(n); ++i) {
    if (!unpack_byte(packed[i], i, n, put)) return false;
  }
  return true;
}

// The same for two bits a trit; put is called for all n trits even if a code is invalid.
template <typename Put>
bool unpack_each_two_bits(const uint8_t* packed, size_t n, const Put& put) {
  bool valid = true;
  for (size_t i = 0; i < kTwoBitTrits * two_bit_size(n); ++i) {
    const int code = packed[i / kTwoBitTrits] >> 2 * (i % kTwoBitTrits) & 3;
    valid &= code != 3 && (i < n || code == 0);
    if (i < n) put(i, two_bit_trit(code));
  }
  return valid;
}

inline void pack_trits(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed) {
  pack_trit_bits(plus, minus, n, packed);
}

inline bool unpack(const uint8_t* packed, size_t n, float m, float* out, DecodeMode mode) {
  return with_output(out, mode, [=](auto to) {
    return unpack_each(packed, n, [=](size_t i, int trit) { put_trit(to, i, trit, m); });
  });
}

inline bool add_trits(const uint8_t* packed, size_t n, int8_t* sums) {
  return unpack_each(packed, n, [=](size_t i, int trit) { sums[i] = trit_sum(sums[i], trit); });
}

inline void pack_two_bits(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed) {
  pack_two_bit_words(plus, minus, n, packed);
}

inline bool unpack_two_bits(const uint8_t* packed, size_t n, float m, float* out, DecodeMode mode) {
  return with_output(out, mode, [=](auto to) {
    return unpack_each_two_bits(packed, n, [=](size_t i, int trit) { put_trit(to, i, trit, m); });
  });
}

inline bool add_two_bits(const uint8_t* packed, size_t n, int8_t* sums) {
  return unpack_each_two_bits(packed, n,
                              [=](size_t i, int trit) { sums[i] = trit_sum(sums[i], trit); });
}

}  // namespace gradwire::scalar
