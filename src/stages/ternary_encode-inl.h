// Ternary quantization, packing and zero-run coding in one pass, for one SIMD target. Contracts:
// stages/kernels.h.

#if defined(GRADWIRE_STAGES_TERNARY_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_TERNARY_ENCODE_INL_H_
#undef GRADWIRE_STAGES_TERNARY_ENCODE_INL_H_
#else
#define GRADWIRE_STAGES_TERNARY_ENCODE_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"
#include "stages/ternary-inl.h"
#include "stages/zero_run-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

// Blocks that are packed before they are zero-run coded. Each by itself would stop the one after it
// from being loaded meanwhile (the coder's chain of instructions is long); a whole chunk would
// leave the memory idle for too long.
constexpr size_t kGroupBlocks = 8;

template <class Residual, typename T>
HWY_INLINE size_t ternary_encode_with(const float* x, T* r, size_t n, float m, uint8_t* codes) {
  RunState state = {codes, 0};
  alignas(64) uint8_t packed[kGroupBlocks * kBlockBytes];
  const size_t blocks = n / kBlockValues;
  const size_t done = blocks * kBlockValues;
  for (size_t first = 0; first < blocks; first += kGroupBlocks) {
    const size_t count = HWY_MIN(kGroupBlocks, blocks - first);
    const size_t at = first * kBlockValues;
    ternary_blocks(x + at, Residual{r == nullptr ? r : r + at}, count, m,
                   [&](size_t block, const SignBits& bits)
                       HWY_ATTR { pack_sign_bits(bits, packed + block * kBlockBytes); });
    for (size_t i = 0; i < count * kBlockBytes; i += kPackedLanes) {
      encode_vector(hn::LoadU(PackedTag(), packed + i), state);
    }
  }
  const size_t last_size = packed_size(n - done);
  if (done != n) {
    ternary_last_block<Residual>(x + done, r == nullptr ? r : r + done, n - done, m, packed);
  }
  size_t i = 0;
  for (; i + kPackedLanes <= last_size; i += kPackedLanes) {
    encode_vector(hn::LoadU(PackedTag(), packed + i), state);
  }
  return static_cast<size_t>(encode_end(packed + i, last_size - i, state) - codes);
}

size_t ternary_encode(const float* x, size_t n, float m, uint8_t* codes) {
  return ternary_encode_with<NoResidual>(x, static_cast<float*>(nullptr), n, m, codes);
}

size_t ternary_encode_f32(const float* x, float* r, size_t n, float m, uint8_t* codes) {
  return ternary_encode_with<ResidualF32>(x, r, n, m, codes);
}

size_t ternary_encode_bf16(const float* x, uint16_t* r, size_t n, float m, uint8_t* codes) {
  return ternary_encode_with<ResidualBf16>(x, r, n, m, codes);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
