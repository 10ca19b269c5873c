#pragma once

// The scalar kernels of zero-run coding. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stages/element/output.h"
#include "stages/trits/trit.h"
#include "stages/trits/trits_scalar.h"
#include "stages/zero_run/zero_run.h"

namespace gradwire::scalar {

inline size_t zero_run_encode(const uint8_t* packed, size_t n, uint8_t* out) {
  size_t size = 0;
  for (size_t i = 0; i < n;) {
    if (packed[i] != kZeroByte) {
      out[size++] = packed[i++];
      continue;
    }
    const size_t last = std::min<size_t>(n, i + kLongestRun);
    int run = 0;
    while (i < last && packed[i] == kZeroByte) ++i, ++run;
    out[size++] = run_code(run);
  }
  return size;
}

inline bool zero_run_decode(const uint8_t* codes, size_t size, uint8_t* packed, size_t n) {
  std::memset(packed, kZeroByte, n);
  size_t place = 0;
  for (size_t i = 0; i < size; ++i) {
    if (place >= n) return false;
    if (codes[i] < kRunBase) packed[place] = codes[i];
    place += static_cast<size_t>(run_length_of(codes[i]));
  }
  return place == n;
}

inline bool zero_run_unpack(const uint8_t* codes, size_t size, size_t n, float m, float* out,
                            DecodeMode mode) {
  return with_output(out, mode, [=](auto to) {
    const auto put = [=](size_t i, int trit) { put_trit(to, i, trit, m); };
    size_t place = 0;
    for (size_t i = 0; i < size; ++i) {
      const size_t end = place + static_cast<size_t>(run_length_of(codes[i]));
      if (end > packed_size(n)) return false;
      if (codes[i] < kRunBase) {
        if (!unpack_byte(codes[i], place, n, put)) return false;
      } else {
        const size_t last = std::min(n, end * kTritsPerByte);
        for (size_t at = place * kTritsPerByte; at < last; ++at) put(at, 0);
      }
      place = end;
    }
    return place == packed_size(n);
  });
}

}  // namespace gradwire::scalar
