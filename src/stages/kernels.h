#pragma once

// The loops behind the codecs, once for each SIMD target. All targets give the same bytes; "scalar"
// (loops over stages/element.h) is the definition.
//
// For every function: bytes, and what add_f32 and the bfloat16 conversions read and write beside
// float32 outputs, may be unaligned; n = 0 is fine, nothing outside the spans is read or
// written (what follows may belong to another thread), nothing is allocated, no state is kept.
// Spans don't overlap. Floats follow IEEE 754; the payload bits of a NaN are not promised.
//
//   x       float32 input          r       residual, float32 or bfloat16 (upper half of a float32)
//   m       multiplier of the trits (3LC), finite and >= 0; the threshold is h = m / 2
//   packed  five trits a byte, ceil(n / 5) bytes for n values, padded with zero trits
//   codes   packed bytes after zero-run coding (3LC, section 3.3)

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/philox.h"
#include "stages/element.h"

namespace gradwire {

struct Kernels {
  // "scalar", "ssse3", "sse4", "avx2", "avx3", "avx3_dl", "neon", ...
  const char* name;
  // The same, told by code that lies beside the kernels of this table and was compiled with them.
  const char* (*compiled_target)();

  // max |x|, max |x + r|: the largest of the sign-cleared bits as an unsigned integer, so that
  // >= 0x7f800000 tells of Inf or NaN. 0 for n = 0.
  uint32_t (*absmax)(const float* x, size_t n);
  uint32_t (*absmax_f32)(const float* x, const float* r, size_t n);
  uint32_t (*absmax_bf16)(const float* x, const uint16_t* r, size_t n);

  // Ternary quantization of b = x (+ r) and packing; r becomes what is left of b.
  void (*ternary_pack)(const float* x, size_t n, float m, uint8_t* packed);
  void (*ternary_pack_f32)(const float* x, float* r, size_t n, float m, uint8_t* packed);
  void (*ternary_pack_bf16)(const float* x, uint16_t* r, size_t n, float m, uint8_t* packed);

  // Zero-run coding of n bytes (n <= 8192) into `out`, which has room for n. Returns the size.
  // `out` may be written up to n bytes, behind the returned size too.
  size_t (*zero_run_encode)(const uint8_t* packed, size_t n, uint8_t* out);
  // Both steps at once for n <= 5 * 8192 values; `codes` has room for ceil(n / 5) bytes. Where
  // memory is the limit this hides the zero-run coding's time.
  size_t (*ternary_encode)(const float* x, size_t n, float m, uint8_t* codes);
  size_t (*ternary_encode_f32)(const float* x, float* r, size_t n, float m, uint8_t* codes);
  size_t (*ternary_encode_bf16)(const float* x, uint16_t* r, size_t n, float m, uint8_t* codes);
  // Decodes `size` codes to exactly n packed bytes. false, with `packed` partly written, if the
  // codes stand for another number of bytes. Any sequence of run codes will do.
  bool (*zero_run_decode)(const uint8_t* codes, size_t size, uint8_t* packed, size_t n);

  // Packed bytes to n values: out = trit * m (+0 where the trit is 0) or out += trit * m (untouched
  // where the trit is 0, but a signalling NaN may become quiet). false, with `out` partly written,
  // if a byte is above 242 or a padding trit is not 0.
  bool (*unpack)(const uint8_t* packed, size_t n, float m, float* out);
  bool (*unpack_add)(const uint8_t* packed, size_t n, float m, float* out);
  // The same from zero-run codes, without the packed bytes in between; false as zero_run_decode
  // too.
  bool (*zero_run_unpack)(const uint8_t* codes, size_t size, size_t n, float m, float* out);
  bool (*zero_run_unpack_add)(const uint8_t* codes, size_t size, size_t n, float m, float* out);

  // float32 <-> bfloat16: narrowing rounds half to even, a NaN becomes 0x7fc0 with its sign.
  void (*narrow_bf16)(const float* x, size_t n, uint16_t* out);
  void (*widen_bf16)(const uint16_t* x, size_t n, float* out);
  void (*widen_add_bf16)(const uint16_t* x, size_t n, float* out);  // out += x

  // The same for IEEE binary16; a NaN becomes 0x7e00 with its sign.
  void (*narrow_f16)(const float* x, size_t n, uint16_t* out);
  void (*widen_f16)(const uint16_t* x, size_t n, float* out);
  void (*widen_add_f16)(const uint16_t* x, size_t n, float* out);  // out += x

  // mask: bit i % 64 of word i / 64 is set where |x[i]| >= t, t > 0; ceil(n / 64) words.
  void (*threshold_bits)(const float* x, size_t n, float t, uint64_t* mask);
  // The values whose bit is set, one behind the other; returns how many. `out` may be written up to
  // n values.
  size_t (*compress)(const float* x, const uint64_t* mask, size_t n, float* out);

  // Sums in the fixed order that stages/element.h defines.
  Moments (*moments)(const float* x, size_t n);

  // words[i] = the word of element first + i, first a multiple of 4.
  void (*draw_words)(const DrawStream& stream, uint64_t first, size_t n, uint32_t* words);

  void (*sum)(const float* a, const float* b, size_t n, float* out);       // out = a + b
  void (*subtract)(const float* a, const float* b, size_t n, float* out);  // out = a - b; may be a
  void (*add_f32)(const float* x, size_t n, float* out);                   // out += x
  void (*divide)(float* x, size_t n, float divisor);  // x /= divisor, a true division
};

// Longest input of zero_run_encode: the packed bytes of one chunk.
inline constexpr size_t kMaxRunInput = 8192;

// The targets that this CPU has and this build contains, best first, "scalar" last.
[[nodiscard]] std::span<const Kernels* const> available_kernels();

// The table of the named target; "auto" is the best. nullptr if it is not available.
[[nodiscard]] const Kernels* find_kernels(std::string_view name);

}  // namespace gradwire
