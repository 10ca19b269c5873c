#include "codecs/trit_sums.h"

#include <algorithm>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "stages/element/float_bits.h"
#include "stages/levels/levels.h"

namespace gradwire {
namespace {

bool add_chunk(TernaryCoder coder, std::span<const uint8_t> bytes, uint64_t n, int8_t* sums,
               const Kernels& kernels) {
  if (coder == TernaryCoder::kTwoBit) return kernels.add_two_bits(bytes.data(), n, sums);
  if (coder == TernaryCoder::kNone) return kernels.add_trits(bytes.data(), n, sums);
  alignas(64) uint8_t packed[kChunkValues / kTritsPerByte];
  if (coder == TernaryCoder::kRice) {
    TritBits trits;
    if (!kernels.rice_decode(bytes.data(), bytes.size(), n, trits.plus, trits.minus)) return false;
    kernels.pack_trits(trits.plus, trits.minus, n, packed);
  } else if (!kernels.zero_run_decode(bytes.data(), bytes.size(), packed, packed_size(n))) {
    return false;
  }
  return kernels.add_trits(packed, n, sums);
}

}  // namespace

TritSums::TritSums(uint64_t n, uint32_t most) : sums_(n) {
  if (most > kLargestByteLevel) wide_.resize(n);
}

void TritSums::clear() {
  std::ranges::fill(sums_, int8_t{0});
  std::ranges::fill(wide_, int16_t{0});
  added_ = 0;
}

void TritSums::widen() {
  std::ranges::transform(wide_, sums_, wide_.begin(),
                         [](int16_t wide, int8_t sum) { return static_cast<int16_t>(wide + sum); });
  std::ranges::fill(sums_, int8_t{0});
  added_ = 0;
}

Status TritSums::add(const TernaryShape& shape, std::string_view name,
                     std::span<const std::byte> payload, Execution& execution) {
  if (added_ == kLargestByteLevel) widen();
  ++added_;
  GW_RETURN_IF_ERROR(
      check_chunks_size(name, shape.chunks, shape.chunks.least_size, payload.size()));
  if (payload.empty()) return {};
  GW_RETURN_IF_ERROR(check_scales(name, payload.data(), shape.groups.count));
  return decode_chunks(
      shape.chunks, payload, name, execution, [&](uint64_t chunk, std::span<const uint8_t> bytes) {
        return add_chunk(shape.coder, bytes, shape.chunks.values(chunk),
                         sums_.data() + shape.chunks.begin(chunk), execution.kernels());
      });
}

bool groups_fit(const Groups& trits, const Groups& sums) {
  return trits.count <= 1 || trits.size % sums.size == 0;
}

uint64_t TritSums::encode(const QsgdShape& shape, const Groups& trits, const std::byte* scales,
                          std::span<std::byte> payload, Execution& execution) {
  if (all_zero(scales, trits.count)) return 0;
  for (uint64_t i = 0; i < shape.groups.count; ++i) {
    const uint64_t group = shape.groups.begin(i) / trits.size;
    const float scale = load_le_f32(scales + group * sizeof(float));
    store_le_f32(payload.data() + i * sizeof(float), level_unit(scale, shape.levels));
  }
  if (!wide_.empty()) widen();
  return encode_chunks(shape.chunks, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
    const auto write = [&](const auto& sums) {
      return write_levels(shape.coder, shape.levels, sums.data() + shape.chunks.begin(chunk),
                          shape.chunks.values(chunk), slot, execution.kernels());
    };
    return wide_.empty() ? write(sums_) : write(wide_);
  });
}

}  // namespace gradwire
