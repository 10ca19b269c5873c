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

// Calls byte(i, value) for each packed byte i < n that is not in a zero run, and zeros(i, k) for
// each run. false, after a part of the calls, if the codes don't stand for exactly n bytes or a
// call returns false.
template <typename Byte, typename Zeros>
bool for_each_run_code(const uint8_t* codes, size_t size, size_t n, Byte byte, Zeros zeros) {
  size_t i = 0;
  for (size_t at = 0; at < size; ++at) {
    const uint8_t code = codes[at];
    const size_t length = static_cast<size_t>(run_length_of(code));
    if (length > n - i) return false;
    if (code < kRunBase) {
      if (!byte(i, code)) return false;
    } else {
      zeros(i, length);
    }
    i += length;
  }
  return i == n;
}

inline bool zero_run_decode(const uint8_t* codes, size_t size, uint8_t* packed, size_t n) {
  return for_each_run_code(
      codes, size, n,
      [=](size_t i, uint8_t value) {
        packed[i] = value;
        return true;
      },
      [=](size_t i, size_t length) { std::memset(packed + i, kZeroByte, length); });
}

inline bool zero_run_unpack(const uint8_t* codes, size_t size, size_t n, float m, float* out,
                            DecodeMode mode) {
  return with_output(out, mode, [=](auto to) {
    const auto put = [=](size_t at, int trit) { put_trit(to, at, trit, m); };
    return for_each_run_code(
        codes, size, packed_size(n),
        [=](size_t i, uint8_t value) { return unpack_byte(value, i, n, put); },
        [=](size_t i, size_t length) {
          const size_t end = std::min(n, (i + length) * kTritsPerByte);
          for (size_t at = i * kTritsPerByte; at < end; ++at) put(at, 0);
        });
  });
}

}  // namespace gradwire::scalar
