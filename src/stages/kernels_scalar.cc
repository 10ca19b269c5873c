#include <algorithm>
#include <cstring>

#include "stages/element.h"
#include "stages/kernel_tables.h"
#include "stages/kernels_scalar_int8.h"
#include "stages/kernels_scalar_levels.h"
#include "stages/kernels_scalar_rice.h"
#include "stages/kernels_scalar_signs.h"
#include "stages/kernels_scalar_trit_draws.h"
#include "stages/residual.h"
#include "stages/threshold.h"

namespace gradwire {
namespace {

const char* compiled_target() { return "scalar"; }

uint32_t absmax(const float* x, size_t n) {
  uint32_t max = 0;
  for (size_t i = 0; i < n; ++i) max = std::max(max, magnitude_bits(x[i]));
  return max;
}

uint32_t absmax_f32(const float* x, const float* r, size_t n) {
  uint32_t max = 0;
  for (size_t i = 0; i < n; ++i) max = std::max(max, magnitude_bits(x[i] + r[i]));
  return max;
}

uint32_t absmax_bf16(const float* x, const uint16_t* r, size_t n) {
  uint32_t max = 0;
  for (size_t i = 0; i < n; ++i) max = std::max(max, magnitude_bits(x[i] + widen_bf16(r[i])));
  return max;
}

// Packs trit(i) for i < n, zero trits behind.
template <typename TritAt>
void pack_trits(size_t n, uint8_t* packed, TritAt trit) {
  for (size_t first = 0; first < n; first += kTritsPerByte) {
    const size_t count = std::min<size_t>(kTritsPerByte, n - first);
    int byte = kZeroByte;
    for (size_t place = 0; place < count; ++place) {
      byte += trit(first + place) * trit_weight(static_cast<int>(place));
    }
    *packed++ = static_cast<uint8_t>(byte);
  }
}

void ternary_pack(const float* x, size_t n, float m, uint8_t* packed) {
  const float h = m * 0.5f;
  pack_trits(n, packed, [=](size_t i) { return ternary_trit(x[i], h); });
}

void ternary_pack_f32(const float* x, float* r, size_t n, float m, uint8_t* packed) {
  const float h = m * 0.5f;
  pack_trits(n, packed, [=](size_t i) {
    const float b = x[i] + r[i];
    const int trit = ternary_trit(b, h);
    r[i] = ternary_residual(b, trit, m);
    return trit;
  });
}

void ternary_pack_bf16(const float* x, uint16_t* r, size_t n, float m, uint8_t* packed) {
  const float h = m * 0.5f;
  pack_trits(n, packed, [=](size_t i) {
    const float b = x[i] + widen_bf16(r[i]);
    const int trit = ternary_trit(b, h);
    r[i] = narrow_bf16(ternary_residual(b, trit, m));
    return trit;
  });
}

size_t zero_run_encode(const uint8_t* packed, size_t n, uint8_t* out) {
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

size_t ternary_encode(const float* x, size_t n, float m, uint8_t* codes) {
  uint8_t packed[kMaxRunInput];
  ternary_pack(x, n, m, packed);
  return zero_run_encode(packed, packed_size(n), codes);
}

size_t ternary_encode_f32(const float* x, float* r, size_t n, float m, uint8_t* codes) {
  uint8_t packed[kMaxRunInput];
  ternary_pack_f32(x, r, n, m, packed);
  return zero_run_encode(packed, packed_size(n), codes);
}

size_t ternary_encode_bf16(const float* x, uint16_t* r, size_t n, float m, uint8_t* codes) {
  uint8_t packed[kMaxRunInput];
  ternary_pack_bf16(x, r, n, m, packed);
  return zero_run_encode(packed, packed_size(n), codes);
}

// Calls byte(i, value) for each packed byte i < n that is not in a zero run, and zeros(i, k) for
// each run. false, after a part of the calls, if the codes don't stand for exactly n bytes or a
// call returns false.
template <typename Byte, typename Zeros>
bool for_each_code(const uint8_t* codes, size_t size, size_t n, Byte byte, Zeros zeros) {
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

bool zero_run_decode(const uint8_t* codes, size_t size, uint8_t* packed, size_t n) {
  return for_each_code(
      codes, size, n,
      [=](size_t i, uint8_t value) {
        packed[i] = value;
        return true;
      },
      [=](size_t i, size_t length) { std::memset(packed + i, kZeroByte, length); });
}

// Calls put(value index, trit) for the trits of packed byte i; false if the byte is invalid.
template <typename Put>
bool unpack_byte(uint8_t byte, size_t i, size_t n, Put put) {
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
bool unpack_each(const uint8_t* packed, size_t n, Put put) {
  for (size_t i = 0; i < packed_size(n); ++i) {
    if (!unpack_byte(packed[i], i, n, put)) return false;
  }
  return true;
}

bool unpack(const uint8_t* packed, size_t n, float m, float* out) {
  return unpack_each(packed, n, [=](size_t i, int trit) { out[i] = ternary_value(trit, m); });
}

bool unpack_add(const uint8_t* packed, size_t n, float m, float* out) {
  return unpack_each(packed, n,
                     [=](size_t i, int trit) { out[i] = ternary_accumulate(out[i], trit, m); });
}

bool add_trits(const uint8_t* packed, size_t n, int8_t* sums) {
  return unpack_each(packed, n, [=](size_t i, int trit) { sums[i] = trit_sum(sums[i], trit); });
}

bool zero_run_unpack(const uint8_t* codes, size_t size, size_t n, float m, float* out) {
  return for_each_code(
      codes, size, packed_size(n),
      [=](size_t i, uint8_t value) {
        return unpack_byte(value, i, n,
                           [=](size_t at, int trit) { out[at] = ternary_value(trit, m); });
      },
      [=](size_t i, size_t length) {
        const size_t end = std::min(n, (i + length) * kTritsPerByte);
        std::fill(out + i * kTritsPerByte, out + end, 0.0f);
      });
}

bool zero_run_unpack_add(const uint8_t* codes, size_t size, size_t n, float m, float* out) {
  return for_each_code(
      codes, size, packed_size(n),
      [=](size_t i, uint8_t value) {
        return unpack_byte(value, i, n, [=](size_t at, int trit) {
          out[at] = ternary_accumulate(out[at], trit, m);
        });
      },
      [](size_t, size_t) {});
}

void narrow_bf16_all(const float* x, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; ++i) store_unaligned(out + i, narrow_bf16(x[i]));
}

void widen_bf16_all(const uint16_t* x, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = widen_bf16(load_unaligned(x + i));
}

void widen_add_bf16(const uint16_t* x, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] += widen_bf16(load_unaligned(x + i));
}

void narrow_f16_all(const float* x, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; ++i) store_unaligned(out + i, narrow_f16(x[i]));
}

void widen_f16_all(const uint16_t* x, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = widen_f16(load_unaligned(x + i));
}

void widen_add_f16(const uint16_t* x, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] += widen_f16(load_unaligned(x + i));
}

size_t float_clip_encode(const float* x, size_t n, const FloatClip& clip, uint8_t* out) {
  size_t size = 0;
  for (size_t i = 0; i < n; i += kBurstValues) {
    size += clip_encode_burst(x + i, std::min(kBurstValues, n - i), clip, out + size);
  }
  return size;
}

// Calls take(value, i) for each of the n values.
template <typename Take>
bool decode_bursts(const uint8_t* bursts, size_t size, size_t n, const Take& take) {
  size_t at = 0;
  for (size_t i = 0; i < n; i += kBurstValues) {
    const size_t count = std::min(kBurstValues, n - i);
    float values[kBurstValues];
    const size_t burst = clip_decode_burst(bursts + at, size - at, count, values);
    if (burst == 0) return false;
    for (size_t j = 0; j < count; ++j) take(values[j], i + j);
    at += burst;
  }
  return at == size;
}

bool float_clip_decode(const uint8_t* bursts, size_t size, size_t n, float* out) {
  return decode_bursts(bursts, size, n, [=](float value, size_t i) { out[i] = value; });
}

bool float_clip_decode_add(const uint8_t* bursts, size_t size, size_t n, float* out) {
  return decode_bursts(bursts, size, n, [=](float value, size_t i) { out[i] += value; });
}

void threshold_bits(const float* x, size_t n, float t, uint64_t* mask) {
  std::fill(mask, mask + (n + 63) / 64, 0);
  for (size_t i = 0; i < n; ++i) mask[i / 64] |= uint64_t{reaches(x[i], t)} << i % 64;
}

size_t compress(const float* x, const uint64_t* mask, size_t n, float* out) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if ((mask[i / 64] >> i % 64 & 1) != 0) out[count++] = x[i];
  }
  return count;
}

size_t take_large(const float* x, size_t n, float t, uint64_t* mask, float* out) {
  return take_each_large(x, NoResidual(), n, t, mask, out);
}

size_t take_large_f32(const float* x, float* r, size_t n, float t, uint64_t* mask, float* out) {
  return take_each_large(x, ResidualOf(r), n, t, mask, out);
}

size_t take_large_bf16(const float* x, uint16_t* r, size_t n, float t, uint64_t* mask, float* out) {
  return take_each_large(x, ResidualOf(r), n, t, mask, out);
}

Moments moments(const float* x, size_t n) {
  MomentLanes sums;
  for (size_t i = 0; i < n; ++i) sums.add(i, x[i]);
  return sums.total();
}

void draw_words(const DrawStream& stream, uint64_t first, size_t n, uint32_t* words) {
  for (size_t i = 0; i < n; i += 4) {
    const PhiloxBlock block = stream.words((first + i) / 4);
    std::copy_n(block.word, std::min<size_t>(4, n - i), words + i);
  }
}

void sum(const float* a, const float* b, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

void subtract(const float* a, const float* b, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = a[i] - b[i];
}

void add_f32(const float* x, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] += load_unaligned(x + i);
}

void divide(float* x, size_t n, float divisor) {
  for (size_t i = 0; i < n; ++i) x[i] /= divisor;
}

constexpr Kernels kScalar = {
    .name = "scalar",
    .compiled_target = compiled_target,
    .absmax = absmax,
    .absmax_f32 = absmax_f32,
    .absmax_bf16 = absmax_bf16,
    .ternary_pack = ternary_pack,
    .ternary_pack_f32 = ternary_pack_f32,
    .ternary_pack_bf16 = ternary_pack_bf16,
    .zero_run_encode = zero_run_encode,
    .ternary_encode = ternary_encode,
    .ternary_encode_f32 = ternary_encode_f32,
    .ternary_encode_bf16 = ternary_encode_bf16,
    .zero_run_decode = zero_run_decode,
    .unpack = unpack,
    .unpack_add = unpack_add,
    .zero_run_unpack = zero_run_unpack,
    .zero_run_unpack_add = zero_run_unpack_add,
    .trit_bits = scalar::trit_bits,
    .trit_bits_f32 = scalar::trit_bits_f32,
    .trit_bits_bf16 = scalar::trit_bits_bf16,
    .draw_trits = scalar::draw_trits,
    .pack_trits = scalar::pack_trits,
    .pack_two_bits = scalar::pack_two_bits,
    .unpack_two_bits = scalar::unpack_two_bits,
    .unpack_two_bits_add = scalar::unpack_two_bits_add,
    .add_trits = add_trits,
    .add_two_bits = scalar::add_two_bits,
    .rice_encode = scalar::rice_encode,
    .rice_decode = scalar::rice_decode,
    .rice_unpack = scalar::rice_unpack,
    .rice_unpack_add = scalar::rice_unpack_add,
    .narrow_bf16 = narrow_bf16_all,
    .widen_bf16 = widen_bf16_all,
    .widen_add_bf16 = widen_add_bf16,
    .narrow_f16 = narrow_f16_all,
    .widen_f16 = widen_f16_all,
    .widen_add_f16 = widen_add_f16,
    .quantize_int8 = scalar::quantize_int8,
    .quantize_int8_f32 = scalar::quantize_int8_f32,
    .quantize_int8_bf16 = scalar::quantize_int8_bf16,
    .dequantize_int8 = scalar::dequantize_int8,
    .dequantize_int8_add = scalar::dequantize_int8_add,
    .add_sign_sums = scalar::add_sign_sums,
    .add_sign_sums_f32 = scalar::add_sign_sums_f32,
    .add_sign_sums_bf16 = scalar::add_sign_sums_bf16,
    .pack_signs = scalar::pack_signs,
    .pack_signs_f32 = scalar::pack_signs_f32,
    .pack_signs_bf16 = scalar::pack_signs_bf16,
    .unpack_signs = scalar::unpack_signs,
    .unpack_signs_add = scalar::unpack_signs_add,
    .float_clip_encode = float_clip_encode,
    .float_clip_decode = float_clip_decode,
    .float_clip_decode_add = float_clip_decode_add,
    .threshold_bits = threshold_bits,
    .compress = compress,
    .take_large = take_large,
    .take_large_f32 = take_large_f32,
    .take_large_bf16 = take_large_bf16,
    .moments = moments,
    .draw_words = draw_words,
    .quantize_levels = scalar::quantize_levels,
    .scale_levels = scalar::scale_levels,
    .scale_add_levels = scalar::scale_add_levels,
    .pack_levels = scalar::pack_levels,
    .unpack_levels = scalar::unpack_levels,
    .encode_sparse_levels = scalar::encode_sparse_levels,
    .encode_dense_levels = scalar::encode_dense_levels,
    .decode_sparse_levels = scalar::decode_sparse_levels,
    .decode_dense_levels = scalar::decode_dense_levels,
    .sum = sum,
    .subtract = subtract,
    .add_f32 = add_f32,
    .divide = divide,
};

}  // namespace

const Kernels& scalar_kernels() { return kScalar; }

}  // namespace gradwire
