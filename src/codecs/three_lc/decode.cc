#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/three_lc/transform.h"
#include "stages/element.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

Status corrupt(const std::string& what) { return {StatusCode::kCorruptPayload, "3lc: " + what}; }

// Each scale finite, its sign bit clear, and at least one above zero.
Status check_scales(const ThreeLcShape& shape, const std::byte* scales) {
  bool any = false;
  for (uint64_t i = 0; i < shape.scales; ++i) {
    const uint32_t bits = load_le<uint32_t>(scales + i * sizeof(float));
    if (bits >= kNonFiniteBits) {
      return corrupt("scale " + std::to_string(i) + " is negative, infinite or NaN");
    }
    any |= bits != 0;
  }
  return any ? Status() : corrupt("all scales are 0, which has an empty payload");
}

// The smallest payload that can hold the shape: each chunk has at least one code for 14 bytes.
uint64_t min_size(const ThreeLcShape& shape, TernaryCoder coder) {
  if (coder == TernaryCoder::kNone) return shape.max_size();
  uint64_t codes = 0;
  if (shape.chunks > 0) {
    const auto fewest = [&](uint64_t chunk) {
      return (packed_size(shape.chunk_values(chunk)) + kLongestRun - 1) / kLongestRun;
    };
    codes = (shape.chunks - 1) * fewest(0) + fewest(shape.chunks - 1);
  }
  return shape.chunks_offset() + codes;
}

// One chunk of a segment whose bytes have been found.
bool decode_chunk(const ThreeLcShape& shape, TernaryCoder coder, uint64_t chunk,
                  std::span<const std::byte> codes, const std::byte* scales, std::span<float> out,
                  DecodeMode mode, const Kernels& kernels) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes.data());
  const uint64_t first = chunk * kChunkValues;
  const uint64_t n = shape.chunk_values(chunk);
  if (coder == TernaryCoder::kZeroRun && shape.scales == 1) {
    const auto decode =
        mode == DecodeMode::kStore ? kernels.zero_run_unpack : kernels.zero_run_unpack_add;
    return decode(bytes, codes.size(), n, load_le_f32(scales), out.data() + first);
  }
  alignas(64) uint8_t packed[kChunkBytes];
  if (coder == TernaryCoder::kZeroRun) {
    if (!kernels.zero_run_decode(bytes, codes.size(), packed, packed_size(n))) return false;
    bytes = packed;
  }
  const auto unpack = mode == DecodeMode::kStore ? kernels.unpack : kernels.unpack_add;
  bool valid = true;
  for_each_scale_in_chunk(shape, chunk, [&](uint64_t scale, uint64_t begin, uint64_t count) {
    valid = valid && unpack(bytes + (begin - first) / kTritsPerByte, count,
                            load_le_f32(scales + scale * sizeof(float)), out.data() + begin);
  });
  return valid;
}

}  // namespace

Status check_three_lc_size(const ThreeLcParameters& parameters, uint64_t n, uint64_t size) {
  if (size == 0) return {};  // all +0
  const ThreeLcShape shape(n, parameters);
  if (n > 0 && size >= min_size(shape, parameters.coder) && size <= shape.max_size()) return {};
  return corrupt(std::to_string(n) + " values don't fit a payload of " + std::to_string(size) +
                 " bytes");
}

Status decode_three_lc(const ThreeLcParameters& parameters, std::span<const std::byte> payload,
                       std::span<float> out, DecodeMode mode, Execution& execution) {
  GW_RETURN_IF_ERROR(check_three_lc_size(parameters, out.size(), payload.size()));
  if (payload.empty()) {
    if (mode == DecodeMode::kStore) std::fill(out.begin(), out.end(), 0.0f);
    return {};
  }
  const ThreeLcShape shape(out.size(), parameters);
  GW_RETURN_IF_ERROR(check_scales(shape, payload.data()));

  // Where each chunk starts among the coded bytes; only sizes that stand in the payload move it.
  const std::span<const std::byte> coded = payload.subspan(shape.chunks_offset());
  std::vector<uint64_t> starts;
  if (shape.has_sizes) {
    const std::byte* sizes = payload.data() + shape.sizes_offset();
    starts.reserve(shape.chunks + 1);
    starts.push_back(0);
    for (uint64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      starts.push_back(starts.back() + load_le<uint16_t>(sizes + chunk * sizeof(uint16_t)));
    }
    if (starts.back() != coded.size()) {
      return corrupt("the chunks' sizes add up to " + std::to_string(starts.back()) +
                     " bytes, there are " + std::to_string(coded.size()));
    }
  }
  std::atomic<uint64_t> first_bad{shape.chunks};
  execution.for_each(shape.chunks, [&](size_t chunk) {
    std::span<const std::byte> codes = coded;
    if (shape.has_sizes) {
      codes = coded.subspan(starts[chunk], starts[chunk + 1] - starts[chunk]);
    } else if (shape.chunks > 1) {
      codes = coded.subspan(chunk * kChunkBytes, packed_size(shape.chunk_values(chunk)));
    }
    if (decode_chunk(shape, parameters.coder, chunk, codes, payload.data(), out, mode,
                     execution.kernels())) {
      return;
    }
    uint64_t seen = first_bad.load();
    while (chunk < seen && !first_bad.compare_exchange_weak(seen, chunk)) {
    }
  });
  if (first_bad.load() == shape.chunks) return {};
  return corrupt("chunk " + std::to_string(first_bad.load()) +
                 " holds bytes that are no packed trits of its length");
}

}  // namespace gradwire
