// Compiles the *-inl.h files once for each SIMD target that the compiler can make.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stages/element.h"
#include "stages/kernel_tables.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stages/kernels_simd.cc"
#define HWY_WANT_AVX3_DL  // Highway before 1.1 makes this target on demand only
#include "hwy/foreach_target.h"
// clang-format off
#include "hwy/highway.h"
#include "stages/absmax-inl.h"
#include "stages/arithmetic-inl.h"
#include "stages/bfloat16-inl.h"
#include "stages/elias-inl.h"
#include "stages/float16-inl.h"
#include "stages/half-inl.h"
#include "stages/int8-inl.h"
#include "stages/float_clip-inl.h"
#include "stages/levels-inl.h"
#include "stages/moments-inl.h"
#include "stages/output-inl.h"
#include "stages/philox-inl.h"
#include "stages/residual-inl.h"
#include "stages/rice-inl.h"
#include "stages/signs-inl.h"
#include "stages/ternary-inl.h"
#include "stages/ternary_encode-inl.h"
#include "stages/threshold-inl.h"
#include "stages/trit_draws-inl.h"
#include "stages/trit_sums-inl.h"
#include "stages/unpack-inl.h"
#include "stages/zero_run-inl.h"
// clang-format on

// Highway's fallbacks without vectors are left out: stages/kernels_scalar.cc takes their place.
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {

// "N_AVX3_DL" -> "avx3_dl"
constexpr std::array<char, 32> lower_case_target() {
  constexpr std::string_view text = HWY_STR(HWY_NAMESPACE);
  std::array<char, 32> name{};
  for (size_t i = 2; i < text.size(); ++i) {
    const char c = text[i];
    name[i - 2] = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return name;
}

constexpr std::array<char, 32> kTargetName = lower_case_target();

const char* compiled_target() { return kTargetName.data(); }

extern constexpr Kernels kTable = {
    .name = kTargetName.data(),
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
    .trit_bits = trit_bits,
    .trit_bits_f32 = trit_bits_f32,
    .trit_bits_bf16 = trit_bits_bf16,
    .draw_trits = draw_trits,
    .pack_trits = pack_trits,
    .pack_two_bits = pack_two_bits,
    .unpack_two_bits = unpack_two_bits,
    .unpack_two_bits_add = unpack_two_bits_add,
    .add_trits = add_trits,
    .add_two_bits = add_two_bits,
    .rice_encode = rice_encode,
    .rice_decode = rice_decode,
    .rice_unpack = rice_unpack,
    .rice_unpack_add = rice_unpack_add,
    .narrow_bf16 = narrow_bf16,
    .widen_bf16 = widen_bf16,
    .widen_add_bf16 = widen_add_bf16,
    .narrow_f16 = narrow_f16,
    .widen_f16 = widen_f16,
    .widen_add_f16 = widen_add_f16,
    .quantize_int8 = quantize_int8,
    .quantize_int8_f32 = quantize_int8_f32,
    .quantize_int8_bf16 = quantize_int8_bf16,
    .dequantize_int8 = dequantize_int8,
    .dequantize_int8_add = dequantize_int8_add,
    .add_sign_sums = add_sign_sums,
    .add_sign_sums_f32 = add_sign_sums_f32,
    .add_sign_sums_bf16 = add_sign_sums_bf16,
    .pack_signs = pack_signs,
    .pack_signs_f32 = pack_signs_f32,
    .pack_signs_bf16 = pack_signs_bf16,
    .unpack_signs = unpack_signs,
    .unpack_signs_add = unpack_signs_add,
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
    .quantize_levels = quantize_levels,
    .scale_levels = scale_levels,
    .scale_add_levels = scale_add_levels,
    .pack_levels = pack_levels,
    .unpack_levels = unpack_levels,
    .encode_sparse_levels = encode_sparse_levels,
    .encode_dense_levels = encode_dense_levels,
    .decode_sparse_levels = decode_sparse_levels,
    .decode_dense_levels = decode_dense_levels,
    .sum = sum,
    .subtract = subtract,
    .add_f32 = add_f32,
    .divide = divide,
};

}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif

#if HWY_ONCE

namespace gradwire {

void append_simd_kernels(std::vector<const Kernels*>& tables) {
  const int64_t supported = hwy::SupportedTargets();
  const auto append = [&](int64_t target, const Kernels& table) {
    if ((supported & target) != 0) tables.push_back(&table);
  };
  // Best first. A target unknown to this version of Highway counts as 0 here.
#if HWY_TARGETS & HWY_AVX10_2
  append(HWY_AVX10_2, N_AVX10_2::kTable);
#endif
#if HWY_TARGETS & HWY_AVX3_SPR
  append(HWY_AVX3_SPR, N_AVX3_SPR::kTable);
#endif
#if HWY_TARGETS & HWY_AVX3_ZEN4
  append(HWY_AVX3_ZEN4, N_AVX3_ZEN4::kTable);
#endif
#if HWY_TARGETS & HWY_AVX3_DL
  append(HWY_AVX3_DL, N_AVX3_DL::kTable);
#endif
#if HWY_TARGETS & HWY_AVX3
  append(HWY_AVX3, N_AVX3::kTable);
#endif
#if HWY_TARGETS & HWY_AVX2
  append(HWY_AVX2, N_AVX2::kTable);
#endif
#if HWY_TARGETS & HWY_SSE4
  append(HWY_SSE4, N_SSE4::kTable);
#endif
#if HWY_TARGETS & HWY_SSSE3
  append(HWY_SSSE3, N_SSSE3::kTable);
#endif
#if HWY_TARGETS & HWY_SSE2
  append(HWY_SSE2, N_SSE2::kTable);
#endif
#if HWY_TARGETS & HWY_SVE2_128
  append(HWY_SVE2_128, N_SVE2_128::kTable);
#endif
#if HWY_TARGETS & HWY_SVE_256
  append(HWY_SVE_256, N_SVE_256::kTable);
#endif
#if HWY_TARGETS & HWY_SVE2
  append(HWY_SVE2, N_SVE2::kTable);
#endif
#if HWY_TARGETS & HWY_SVE
  append(HWY_SVE, N_SVE::kTable);
#endif
#if HWY_TARGETS & HWY_NEON_BF16
  append(HWY_NEON_BF16, N_NEON_BF16::kTable);
#endif
#if HWY_TARGETS & HWY_NEON
  append(HWY_NEON, N_NEON::kTable);
#endif
#if HWY_TARGETS & HWY_NEON_WITHOUT_AES
  append(HWY_NEON_WITHOUT_AES, N_NEON_WITHOUT_AES::kTable);
#endif
}

}  // namespace gradwire

#endif  // HWY_ONCE
