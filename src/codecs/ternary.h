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
#include "stages/trit_bits.h"

namespace gradwire {

// How trits become bytes. The numbers stand in headers.
enum class TernaryCoder : uint8_t {
  kNone = 0,     // five to a byte
  kZeroRun = 1,  // the same, and runs of zero bytes shortened
  kRice = 2,     // gaps between non-zeros in Golomb-Rice code
  kTwoBit = 3,   // four to a byte
};

// Trits of a chunk as bits (stages/trit_bits.h), for coders that don't take packed bytes.
struct TritBits {
  static constexpr uint64_t kWords = kChunkValues / kWordBits;
  alignas(64) uint64_t plus[kWords];
  alignas(64) uint64_t minus[kWords];

  // Puts n trits behind the first `at`, in any number of calls from at = 0 on without a hole.
  void append(uint64_t at, const TritBits& trits, uint64_t n);
};

// Payload of every codec whose values are -m, 0 or +m (spec/format.md, Ternary payloads):
//   scales f32, one a bucket | sizes of the chunks | chunks of coded trits
// All scales 0: an empty payload instead.
struct TernaryShape {
  TernaryCoder coder;
  Buckets buckets;
  ChunkShape chunks;

  // bucket: values that share a scale, a multiple of 5, and of 4 for kTwoBit; 0: all.
  TernaryShape(uint64_t n, TernaryCoder coder, uint64_t bucket);

  [[nodiscard]] uint64_t max_size() const { return chunks.max_size(); }
};

// Codes the n trits of a chunk into `slot`, which has room for them (TernaryShape). Returns the
// size.
uint64_t code_trits(TernaryCoder coder, const TritBits& trits, uint64_t n, uint8_t* slot,
                    const Kernels& kernels);

// Behind Codec::check_size and Codec::decode. `name` is the codec's, for messages.
Status check_ternary_size(const TernaryShape& shape, std::string_view name, uint64_t size);
Status decode_ternary(const TernaryShape& shape, std::string_view name,
                      std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                      Execution& execution);

}  // namespace gradwire
