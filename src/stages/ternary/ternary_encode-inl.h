// Ternary quantization, packing and zero-run coding in one pass, for one SIMD target. Contracts:
// stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/ternary/ternary-inl.h"
#include "stages/trits/trit.h"
#include "stages/zero_run/zero_run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// Blocks that are packed before they are zero-run coded. If each block were coded immediately, the
// coder's long chain of instructions would keep the next block from being loaded meanwhile; if a
// whole chunk were packed first, the memory would be idle for too long.
constexpr size_t kGroupBlocks = 8;

template <class Residual>
HWY_INLINE size_t ternary_encode_of(const float* x, Residual residual, size_t n, float m,
                                    uint8_t* codes) {
  RunState state = {codes, 0};
  alignas(64) uint8_t packed[kGroupBlocks * kBlockBytes];
  const size_t blocks = n / kBlockValues;
  const size_t done = blocks * kBlockValues;
  for (size_t first = 0; first < blocks; first += kGroupBlocks) {
    const size_t count = HWY_MIN(kGroupBlocks, blocks - first);
    const size_t at = first * kBlockValues;
    ternary_blocks(x + at, residual.from(at), count, m,
                   [&](size_t block, const SignBits& bits)
                       HWY_ATTR { pack_sign_bits(bits, packed + block * kBlockBytes); });
    for (size_t i = 0; i < count * kBlockBytes; i += kPackedLanes) {
      encode_vector(hn::LoadU(PackedTag(), packed + i), state);
    }
  }
  if (done != n) ternary_last_block(x + done, residual.from(done), n - done, m, packed);
  const size_t last_size = packed_size(n - done);
  size_t i = 0;
  for (; i + kPackedLanes <= last_size; i += kPackedLanes) {
    encode_vector(hn::LoadU(PackedTag(), packed + i), state);
  }
  return static_cast<size_t>(encode_end(packed + i, last_size - i, state) - codes);
}

size_t ternary_encode(const float* x, ResidualValues r, size_t n, float m, uint8_t* codes) {
  return with_residual(
      r, [=](auto residual) HWY_ATTR { return ternary_encode_of(x, residual, n, m, codes); });
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
