#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/endian.h"
#include "codecs/three_lc/transform.h"
#include "stages/element.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

uint32_t absmax(const Kernels& kernels, std::span<const float> x, const ResidualView& residual,
                uint64_t begin, uint64_t n) {
  switch (residual.type()) {
    case ResidualType::kNone:
      return kernels.absmax(x.data() + begin, n);
    case ResidualType::kFloat32:
      return kernels.absmax_f32(x.data() + begin, residual.f32() + begin, n);
    case ResidualType::kBfloat16:
      return kernels.absmax_bf16(x.data() + begin, residual.bf16() + begin, n);
  }
  return 0;
}

void ternary_pack(const Kernels& kernels, std::span<const float> x, const ResidualView& residual,
                  uint64_t begin, uint64_t n, float m, uint8_t* packed) {
  switch (residual.type()) {
    case ResidualType::kNone:
      return kernels.ternary_pack(x.data() + begin, n, m, packed);
    case ResidualType::kFloat32:
      return kernels.ternary_pack_f32(x.data() + begin, residual.f32() + begin, n, m, packed);
    case ResidualType::kBfloat16:
      return kernels.ternary_pack_bf16(x.data() + begin, residual.bf16() + begin, n, m, packed);
  }
}

uint64_t ternary_encode(const Kernels& kernels, std::span<const float> x,
                        const ResidualView& residual, uint64_t begin, uint64_t n, float m,
                        uint8_t* codes) {
  switch (residual.type()) {
    case ResidualType::kNone:
      return kernels.ternary_encode(x.data() + begin, n, m, codes);
    case ResidualType::kFloat32:
      return kernels.ternary_encode_f32(x.data() + begin, residual.f32() + begin, n, m, codes);
    case ResidualType::kBfloat16:
      return kernels.ternary_encode_bf16(x.data() + begin, residual.bf16() + begin, n, m, codes);
  }
  return 0;
}

void raise_to(std::atomic<uint32_t>& maximum, uint32_t value) {
  uint32_t seen = maximum.load(std::memory_order_relaxed);
  while (value > seen && !maximum.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// Writes the multiplier of every scale. false: a value is not finite.
// Runs over the pieces from the end to the start, so that the second pass, from the start to the
// end, begins with what the caches still hold.
bool write_scales(const ThreeLcShape& shape, float sparsity, std::span<const float> x,
                  const ResidualView& residual, std::byte* scales, uint32_t& largest,
                  Execution& execution) {
  std::atomic<uint32_t> overall{0};
  if (shape.scales == 1) {
    execution.for_each(shape.chunks, [&](size_t i) {
      const uint64_t chunk = shape.chunks - 1 - i;
      raise_to(overall, absmax(execution.kernels(), x, residual, chunk * kChunkValues,
                               shape.chunk_values(chunk)));
    });
    store_le_f32(scales, ternary_multiplier(overall.load(), sparsity));
  } else {
    const uint64_t buckets_a_task = std::max<uint64_t>(1, kChunkValues / shape.bucket);
    const uint64_t tasks = (shape.scales + buckets_a_task - 1) / buckets_a_task;
    execution.for_each(tasks, [&](size_t i) {
      const uint64_t first = (tasks - 1 - i) * buckets_a_task;
      const uint64_t last = std::min(shape.scales, first + buckets_a_task);
      for (uint64_t scale = first; scale < last; ++scale) {
        const uint64_t begin = scale * shape.bucket;
        const uint32_t magnitude = absmax(execution.kernels(), x, residual, begin,
                                          std::min(shape.bucket, shape.n - begin));
        raise_to(overall, magnitude);
        store_le_f32(scales + scale * sizeof(float), ternary_multiplier(magnitude, sparsity));
      }
    });
  }
  largest = overall.load();
  return largest < kNonFiniteBits;
}

// Quantizes, packs and codes one chunk into `slot`, which has room for its packed bytes.
uint64_t encode_chunk(const ThreeLcShape& shape, TernaryCoder coder, uint64_t chunk,
                      std::span<const float> x, const ResidualView& residual,
                      const std::byte* scales, uint8_t* slot, const Kernels& kernels) {
  const uint64_t values = shape.chunk_values(chunk);
  if (coder == TernaryCoder::kZeroRun && shape.scales == 1) {
    return ternary_encode(kernels, x, residual, chunk * kChunkValues, values, load_le_f32(scales),
                          slot);
  }
  const uint64_t size = packed_size(values);
  alignas(64) uint8_t packed[kChunkBytes];
  uint8_t* destination = coder == TernaryCoder::kNone ? slot : packed;
  for_each_scale_in_chunk(shape, chunk, [&](uint64_t scale, uint64_t begin, uint64_t n) {
    const uint64_t offset = (begin - chunk * kChunkValues) / kTritsPerByte;
    ternary_pack(kernels, x, residual, begin, n, load_le_f32(scales + scale * sizeof(float)),
                 destination + offset);
  });
  return coder == TernaryCoder::kNone ? size : kernels.zero_run_encode(packed, size, slot);
}

}  // namespace

Result<uint64_t> encode_three_lc(const ThreeLcParameters& parameters, std::span<const float> x,
                                 ResidualView residual, std::span<std::byte> payload,
                                 Execution& execution) {
  const ThreeLcShape shape(x.size(), parameters);
  uint32_t largest = 0;
  if (!write_scales(shape, parameters.sparsity, x, residual, payload.data(), largest, execution)) {
    return Status(StatusCode::kNonFinite, {});
  }
  // m = 0: nothing is sent but the header. A residual that the input has just cancelled is now 0.
  if (largest == 0 && residual.type() == ResidualType::kNone) return 0;

  // Each chunk goes to the place where it would stand if none before it had shrunk; so threads
  // don't wait for each other, and no scratch is needed.
  auto* slots = reinterpret_cast<uint8_t*>(payload.data() + shape.chunks_offset());
  std::byte* sizes = payload.data() + shape.sizes_offset();
  uint64_t sole_size = 0;
  execution.for_each(shape.chunks, [&](size_t chunk) {
    const uint64_t size = encode_chunk(shape, parameters.coder, chunk, x, residual, payload.data(),
                                       slots + chunk * kChunkBytes, execution.kernels());
    if (shape.has_sizes) {
      store_le(sizes + chunk * sizeof(uint16_t), static_cast<uint16_t>(size));
    } else if (chunk == 0) {
      sole_size = size;
    }
  });
  if (largest == 0) return 0;
  if (parameters.coder == TernaryCoder::kNone) return shape.max_size();
  if (!shape.has_sizes) return shape.chunks_offset() + sole_size;

  uint64_t end = 0;
  for (uint64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const uint64_t size = load_le<uint16_t>(sizes + chunk * sizeof(uint16_t));
    std::memmove(slots + end, slots + chunk * kChunkBytes, size);
    end += size;
  }
  return shape.chunks_offset() + end;
}

}  // namespace gradwire
