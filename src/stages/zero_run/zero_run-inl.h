// Zero-run coding (3LC, section 3.3), for one SIMD target. Contracts: stages/kernels.def.
//
// Encoding has no branch on the data. The bytes of a zero run are numbered 1, 2, ... The code of a
// run (or of each 14 bytes of it) follows from the number of its last byte. So each byte is
// replaced by the code of its number, and then only the last byte of each run is kept. A run that
// reaches the end of a vector leaves its length, below 14, to the next vector.

#if defined(GRADWIRE_STAGES_ZERO_RUN_ZERO_RUN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_ZERO_RUN_ZERO_RUN_INL_H_
#undef GRADWIRE_STAGES_ZERO_RUN_ZERO_RUN_INL_H_
#else
#define GRADWIRE_STAGES_ZERO_RUN_ZERO_RUN_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/trits/trit.h"
#include "stages/zero_run/zero_run_scalar.h"
#include "stages/zero_run/zero_run_tables.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// The state of the encoder: `run` zero bytes (0..13) are read but not yet written.
struct RunState {
  uint8_t* out;
  size_t run;
};

// Writes the code of the open run, if there is one and `ends` is 1.
HWY_INLINE void close_run(RunState& state, size_t ends) {
  *state.out = run_code(static_cast<int>(state.run));
  state.out += ends & static_cast<size_t>(state.run != 0);
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL

// For each byte the number (1..64) of the last set byte up to it, or 0 if none is set.
HWY_INLINE __m512i last_set(__m512i numbers) {
  numbers = _mm512_max_epu8(numbers, _mm512_bslli_epi128(numbers, 1));
  numbers = _mm512_max_epu8(numbers, _mm512_bslli_epi128(numbers, 2));
  numbers = _mm512_max_epu8(numbers, _mm512_bslli_epi128(numbers, 4));
  numbers = _mm512_max_epu8(numbers, _mm512_bslli_epi128(numbers, 8));
  // Now across the four 128-bit blocks: their last bytes, moved up by one block and by two.
  __m512i ends = _mm512_shuffle_epi8(numbers, _mm512_set1_epi8(15));
  const __m512i one_up = _mm512_maskz_shuffle_i64x2(0xfc, ends, ends, 0x90);
  ends = _mm512_max_epu8(ends, one_up);
  const __m512i two_up = _mm512_maskz_shuffle_i64x2(0xf0, ends, ends, 0x40);
  return _mm512_max_epu8(numbers, _mm512_max_epu8(one_up, two_up));
}

HWY_INLINE void encode_vector(PackedVec packed, RunState& state) {
  const __m512i bytes = packed.raw;
  const uint64_t zeros = _cvtmask64_u64(_mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(kZeroByte)));
  close_run(state, ~zeros & 1);
  const size_t carried = state.run * (zeros & 1);

  const __m512i numbers = _mm512_load_si512(kNumbers.of);
  const __m512i last = last_set(_mm512_maskz_mov_epi8(_cvtu64_mask64(~zeros), numbers));
  __m512i place = _mm512_sub_epi8(numbers, last);
  place = _mm512_mask_add_epi8(place, _mm512_testn_epi8_mask(last, last), place,
                               _mm512_set1_epi8(static_cast<char>(carried)));
  const __m512i codes = _mm512_permutex2var_epi8(_mm512_load_si512(kCodeOfPlace.of), place,
                                                 _mm512_load_si512(kCodeOfPlace.of + 64));
  const uint64_t full = _cvtmask64_u64(_mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-1)));
  const uint64_t run_ends = zeros & ~(zeros >> 1 | uint64_t{1} << 63);
  const uint64_t keep = ~zeros | run_ends | full;
  const __m512i merged = _mm512_mask_mov_epi8(bytes, _cvtu64_mask64(zeros), codes);
  _mm512_storeu_si512(state.out, _mm512_maskz_compress_epi8(_cvtu64_mask64(keep), merged));
  state.out += hwy::PopCount(keep);

  const size_t open = ~zeros == 0 ? carried + 64 : hwy::Num0BitsAboveMS1Bit_Nonzero64(~zeros);
  state.run = open % kLongestRun;
}

#else

HWY_INLINE void encode_vector(PackedVec bytes, RunState& state) {
  const PackedTag d8;
  const auto is_zero = hn::Eq(bytes, hn::Set(d8, kZeroByte));
  const size_t zeros = static_cast<size_t>(bits_of_mask(d8, is_zero));
  close_run(state, ~zeros & 1);
  const size_t carried = state.run * (zeros & 1);

  const auto numbers = hn::Load(d8, kNumbers.of);
  auto last = hn::IfThenZeroElse(is_zero, numbers);
  last = hn::Max(last, hn::ShiftLeftBytes<1>(d8, last));
  last = hn::Max(last, hn::ShiftLeftBytes<2>(d8, last));
  last = hn::Max(last, hn::ShiftLeftBytes<4>(d8, last));
  last = hn::Max(last, hn::ShiftLeftBytes<8>(d8, last));
  // `place` is 1..29; two subtractions bring it to 1..14.
  auto place = hn::Sub(numbers, last);
  place = hn::Add(place, hn::IfThenElseZero(hn::Eq(last, hn::Zero(d8)),
                                            hn::Set(d8, static_cast<uint8_t>(carried))));
  const auto longest = hn::Set(d8, kLongestRun);
  place = hn::Sub(place, hn::IfThenElseZero(hn::Gt(place, longest), longest));
  place = hn::Sub(place, hn::IfThenElseZero(hn::Gt(place, longest), longest));
  const auto codes = hn::TableLookupBytes(hn::Load(d8, kCodeOfPlace.of), place);
  const size_t full =
      static_cast<size_t>(bits_of_mask(d8, hn::And(is_zero, hn::Eq(place, longest))));
  const size_t run_ends = zeros & ~(zeros >> 1 | 0x8000u);
  const size_t keep = (~zeros & 0xffffu) | run_ends | full;
  const auto merged = hn::IfThenElse(is_zero, codes, bytes);
  size_t count = 0;
  store_kept(d8, merged, keep, state.out, count);
  state.out += count;

  const size_t literals = ~zeros & 0xffffu;
  const size_t open =
      literals == 0 ? carried + 16
                    : hwy::Num0BitsAboveMS1Bit_Nonzero32(static_cast<uint32_t>(literals)) - 16;
  state.run = open % kLongestRun;
}

#endif

// Encodes the last bytes, fewer than a vector, and ends the run that is open. Returns the end.
HWY_INLINE uint8_t* encode_end(const uint8_t* packed, size_t n, RunState state) {
  for (size_t i = 0; i < n; ++i) {
    if (packed[i] != kZeroByte) {
      close_run(state, 1);
      state.run = 0;
      *state.out++ = packed[i];
    } else if (++state.run == kLongestRun) {
      *state.out++ = run_code(kLongestRun);
      state.run = 0;
    }
  }
  if (state.run != 0) close_run(state, 1);
  return state.out;
}

size_t zero_run_encode(const uint8_t* packed, size_t n, uint8_t* out) {
  // Codes are never longer than the bytes read, so whole vectors can be stored to `out`.
  RunState state = {out, 0};
  size_t i = 0;
  for (; i + kPackedLanes <= n; i += kPackedLanes) {
    encode_vector(hn::LoadU(PackedTag(), packed + i), state);
  }
  return static_cast<size_t>(encode_end(packed + i, n - i, state) - out);
}

bool zero_run_decode(const uint8_t* codes, size_t size, uint8_t* packed, size_t n) {
  return scalar::zero_run_decode(codes, size, packed, n);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
