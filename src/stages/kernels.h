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
//   s       the largest level, 1 to 127
//   codes   packed bytes after zero-run coding (3LC, section 3.3)
//   plus, minus  trits as two bit arrays of ceil(n / 64) words (stages/trit_bits.h)

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/philox.h"
#include "stages/element.h"
#include "stages/float_clip.h"
#include "stages/levels.h"
#include "stages/signs.h"
#include "stages/trit_draws.h"

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

  // Ternary quantization as in ternary_pack, to bits.
  void (*trit_bits)(const float* x, size_t n, float m, uint64_t* plus, uint64_t* minus);
  void (*trit_bits_f32)(const float* x, float* r, size_t n, float m, uint64_t* plus,
                        uint64_t* minus);
  void (*trit_bits_bf16)(const float* x, uint16_t* r, size_t n, float m, uint64_t* plus,
                         uint64_t* minus);

  // The trits that are drawn for finite b (stages/trit_draws.h), by a random word each.
  void (*draw_trits)(const float* b, size_t n, TritDraw draw, const uint32_t* words, uint64_t* plus,
                     uint64_t* minus);
  // Five to a byte.
  void (*pack_trits)(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed);
  // Four to a byte: two_bit_size(n) bytes.
  void (*pack_two_bits)(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed);
  // The way back, as unpack and unpack_add. false, with `out` written nonetheless, if a code is 3
  // or one of the padding isn't 0.
  bool (*unpack_two_bits)(const uint8_t* packed, size_t n, float m, float* out);
  bool (*unpack_two_bits_add)(const uint8_t* packed, size_t n, float m, float* out);
  // sums += trits, from five or four to a byte; no sum may leave the range of int8. false, with
  // some trits added, for bytes that unpack or unpack_two_bits refuse.
  bool (*add_trits)(const uint8_t* packed, size_t n, int8_t* sums);
  bool (*add_two_bits)(const uint8_t* packed, size_t n, int8_t* sums);

  // Codes n <= 5 * 8192 trits (stages/rice.h) into `out`, which has room for ceil(n / 5) bytes.
  // Returns the size: ceil(n / 5) means packed bytes, as the code would not have been smaller.
  size_t (*rice_encode)(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* out);
  // The way back, to bits or as unpack and unpack_add. false, with the output partly written, for
  // bytes that stand for no n trits.
  bool (*rice_decode)(const uint8_t* bytes, size_t size, size_t n, uint64_t* plus, uint64_t* minus);
  bool (*rice_unpack)(const uint8_t* bytes, size_t size, size_t n, float m, float* out);
  bool (*rice_unpack_add)(const uint8_t* bytes, size_t size, size_t n, float m, float* out);

  // float32 <-> bfloat16: narrowing rounds half to even, a NaN becomes 0x7fc0 with its sign.
  void (*narrow_bf16)(const float* x, size_t n, uint16_t* out);
  void (*widen_bf16)(const uint16_t* x, size_t n, float* out);
  void (*widen_add_bf16)(const uint16_t* x, size_t n, float* out);  // out += x

  // The same for IEEE binary16; a NaN becomes 0x7e00 with its sign.
  void (*narrow_f16)(const float* x, size_t n, uint16_t* out);
  void (*widen_f16)(const uint16_t* x, size_t n, float* out);
  void (*widen_add_f16)(const uint16_t* x, size_t n, float* out);  // out += x

  // stages/int8.h of each value of b = x (+ r); r becomes what is left of b. `unit` is finite and
  // >= 0, out += q * unit for _add. false, with `out` written nonetheless, if a q is -128.
  void (*quantize_int8)(const float* x, size_t n, float unit, int8_t* q);
  void (*quantize_int8_f32)(const float* x, float* r, size_t n, float unit, int8_t* q);
  void (*quantize_int8_bf16)(const float* x, uint16_t* r, size_t n, float unit, int8_t* q);
  bool (*dequantize_int8)(const int8_t* q, size_t n, float unit, float* out);
  bool (*dequantize_int8_add)(const int8_t* q, size_t n, float unit, float* out);

  // Adds the values of b = x (+ r) to sums (stages/signs.h); value i goes to lane i % 16.
  void (*add_sign_sums)(const float* x, size_t n, SignLanes& lanes);
  void (*add_sign_sums_f32)(const float* x, const float* r, size_t n, SignLanes& lanes);
  void (*add_sign_sums_bf16)(const float* x, const uint16_t* r, size_t n, SignLanes& lanes);
  // A bit a value of b = x (+ r) from the lowest of a byte on, set where it is below 0 (so not for
  // -0); zeros behind: sign_bytes(n) bytes. r becomes b less its mean.
  void (*pack_signs)(const float* x, size_t n, uint8_t* bits);
  void (*pack_signs_f32)(const float* x, float* r, size_t n, SignMeans means, uint8_t* bits);
  void (*pack_signs_bf16)(const float* x, uint16_t* r, size_t n, SignMeans means, uint8_t* bits);
  // out = the mean for each bit, out += the mean. false, with `out` written nonetheless, if a bit
  // behind the last one is not 0.
  bool (*unpack_signs)(const uint8_t* bits, size_t n, SignMeans means, float* out);
  bool (*unpack_signs_add)(const uint8_t* bits, size_t n, SignMeans means, float* out);
  // INCEPTIONN's bursts (stages/float_clip.h) of n values. `out` has room for 2 ceil(n / 8) + 4 n
  // bytes, and all of it may be written. Returns the size.
  size_t (*float_clip_encode)(const float* x, size_t n, const FloatClip& clip, uint8_t* out);
  // Decodes `size` bytes of bursts to n values: out = value or out += value. false, with `out`
  // partly written, if they don't fill the bytes or an absent value has a tag.
  bool (*float_clip_decode)(const uint8_t* bursts, size_t size, size_t n, float* out);
  bool (*float_clip_decode_add)(const uint8_t* bursts, size_t size, size_t n, float* out);

  // mask: bit i % 64 of word i / 64 is set where |x[i]| >= t, t > 0; ceil(n / 64) words.
  void (*threshold_bits)(const float* x, size_t n, float t, uint64_t* mask);
  // The values whose bit is set, one behind the other; returns how many. `out` may be written up to
  // n values.
  size_t (*compress)(const float* x, const uint64_t* mask, size_t n, float* out);
  // Both at once for b = x (+ r); r becomes b where the bit is not set, 0 where it is.
  size_t (*take_large)(const float* x, size_t n, float t, uint64_t* mask, float* out);
  size_t (*take_large_f32)(const float* x, float* r, size_t n, float t, uint64_t* mask, float* out);
  size_t (*take_large_bf16)(const float* x, uint16_t* r, size_t n, float t, uint64_t* mask,
                            float* out);

  // Sums in the fixed order that stages/element.h defines, and the largest magnitude.
  Moments (*moments)(const float* x, size_t n);

  // words[i] = the word of element first + i, first a multiple of 4.
  void (*draw_words)(const DrawStream& stream, uint64_t first, size_t n, uint32_t* words);

  // Levels of n values up to the scale's norm (QSGD, section 3.1; stages/levels.h) by a random word
  // each.
  void (*quantize_levels)(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                          int8_t* levels);
  // out = level * unit, out += level * unit.
  void (*scale_levels)(const int8_t* levels, size_t n, float unit, float* out);
  void (*scale_add_levels)(const int8_t* levels, size_t n, float unit, float* out);
  // n levels from -s to s as level + s in level_width(s) bits each, from the lowest bit of a byte
  // on, zeros behind: packed_levels_size bytes. unpack: false, with `levels` partly written, if a
  // level is above s or a bit behind the last one is not 0.
  void (*pack_levels)(const int8_t* levels, size_t n, int32_t s, uint8_t* packed);
  bool (*unpack_levels)(const uint8_t* packed, size_t n, int32_t s, int8_t* levels);
  // Elias coding of n < kEliasLimit - 1 levels from -s to s (stages/elias.h) into `out`, which has
  // room for sparse_levels_room or dense_levels_room bytes. Returns the size.
  size_t (*encode_sparse_levels)(const int8_t* levels, size_t n, uint8_t* out);
  size_t (*encode_dense_levels)(const int8_t* levels, size_t n, uint8_t* out);
  // false, with `levels` partly written, if the bytes stand for another number of levels or one
  // above s, or if the last byte isn't filled up with zeros.
  bool (*decode_sparse_levels)(const uint8_t* coded, size_t size, size_t n, int32_t s,
                               int8_t* levels);
  bool (*decode_dense_levels)(const uint8_t* coded, size_t size, size_t n, int32_t s,
                              int8_t* levels);

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
