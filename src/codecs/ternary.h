#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codecs/chunks.h"
#include "codecs/scales.h"
#include "gradwire/codec.h"
#include "gradwire/status.h"
#include "stages/kernels.h"

namespace gradwire {

// How trits become bytes. The numbers stand in headers.
enum class TernaryCoder : uint8_t {
  kNone = 0,     // five to a byte
  kZeroRun = 1,  // the same, and runs of zero bytes shortened
};

// Payload of every codec whose values are -m, 0 or +m (spec/format.md, Ternary payloads):
//   scales f32, one a bucket | sizes of the chunks | chunks of coded trits
// All scales 0: an empty payload instead.
struct TernaryShape {
  TernaryCoder coder;
  Buckets buckets;
  ChunkShape chunks;

  // bucket: values that share a scale, a multiple of 5; 0: all.
  TernaryShape(uint64_t n, TernaryCoder coder, uint64_t bucket);

  [[nodiscard]] uint64_t max_size() const { return chunks.max_size(); }
};

// Behind Codec::check_size and Codec::decode. `name` is the codec's, for messages.
Status check_ternary_size(const TernaryShape& shape, std::string_view name, uint64_t size);
Status decode_ternary(const TernaryShape& shape, std::string_view name,
                      std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                      Execution& execution);

}  // namespace gradwire
