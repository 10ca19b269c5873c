#pragma once

// The scalar kernels of the rice coder. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/rice/rice.h"
#include "stages/rice/rice_bits.h"
#include "stages/trits/trits_scalar.h"

namespace gradwire::scalar {

// The k that takes the fewest bits, the smallest if several do.
inline int best_k(const uint32_t* gaps, size_t count) {
  int best = 0;
  int fewest = kRiceLongestGroup;
  for (int k = 0; k < kRiceChoices; ++k) {
    int length = 0;
    for (size_t i = 0; i < count; ++i) length += rice_length(gaps[i], k);
    if (length < fewest) best = k, fewest = length;
  }
  return best;
}

// Codes the non-zeros marks[1] to marks[count] (encode_rice).
inline void write_group(const uint32_t* marks, size_t count, RiceWriter& writer) {
  uint32_t gaps[kRiceGroup];
  for (size_t i = 0; i < count; ++i) gaps[i] = (marks[i + 1] >> 1) - (marks[i] >> 1) - 1;
  const int k = best_k(gaps, count);
  writer.put(0, static_cast<uint64_t>(k), kRiceHeadBits);
  for (size_t i = 0; i < count; ++i) {
    writer.flush();
    const RiceCode code = rice_code(gaps[i], marks[i + 1] & 1, k);
    writer.put(0, code.bits, static_cast<uint32_t>(code.length));
  }
  writer.flush();
}

inline size_t rice_encode(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* out) {
  return encode_rice(plus, minus, n, out, append_marks, write_group);
}

inline bool rice_decode(const uint8_t* bytes, size_t size, size_t n, uint64_t* plus,
                        uint64_t* minus) {
  return decode_rice(bytes, size, n, plus, minus);
}

inline bool rice_unpack(const uint8_t* bytes, size_t size, size_t n, float m, float* out,
                        DecodeMode mode) {
  if (size == packed_size(n)) return unpack(bytes, n, m, out, mode);
  if (size > packed_size(n)) return false;
  if (mode == DecodeMode::kStore) std::fill_n(out, n, 0.0f);
  return with_output(out, mode, [=](auto to) {
    return for_each_rice_code(
        bytes, size, n, [=](size_t i, uint32_t sign) { put_trit(to, i, sign == 0 ? 1 : -1, m); });
  });
}

}  // namespace gradwire::scalar
