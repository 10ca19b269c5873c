#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "codecs/chunks.h"
#include "codecs/scales.h"
#include "gradwire/codec.h"
#include "gradwire/status.h"
#include "stages/kernels.h"

namespace gradwire {

// How levels become bytes. The numbers stand in headers.
enum class LevelCoder : uint8_t {
  kFixed = 0,   // each takes the same bits
  kSparse = 1,  // Elias codes of those that are not 0, and of their distances
  kDense = 2,   // Elias codes of all
};

// Payload of levels times units (spec/format.md, qsgd):
//   units f32, one a bucket | sizes of the chunks | chunks of coded levels
// All units 0: an empty payload instead.
struct QsgdShape {
  int32_t levels;  // the largest, s
  LevelCoder coder;
  Buckets buckets;
  ChunkShape chunks;

  // bucket: values that share a unit, a multiple of 8.
  QsgdShape(uint64_t n, int32_t s, LevelCoder level_coder, uint64_t bucket);
};

// That of the codec's payloads for n values; nothing where it isn't qsgd.
std::optional<QsgdShape> qsgd_shape(const Codec& codec, uint64_t n);

// Codes the levels of one chunk into `slot`, which has its room, and returns the size.
uint64_t write_levels(const QsgdShape& shape, uint64_t chunk, const int8_t* levels, uint8_t* slot,
                      const Kernels& kernels);

// Behind Codec::check_size and Codec::decode. `name` is the codec's, for messages.
Status check_qsgd_size(const QsgdShape& shape, std::string_view name, uint64_t size);
Status decode_qsgd(const QsgdShape& shape, std::string_view name,
                   std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                   Execution& execution);

}  // namespace gradwire
