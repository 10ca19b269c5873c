#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/chunked_codec.h"
#include "codecs/registry.h"
#include "codecs/ternary_coder.h"
#include "gradwire/codec.h"
#include "stages/kernels.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {

// Trits of a chunk as bits (stages/trits/trit_bits.h), for coders that don't take packed bytes.
struct TritBits {
  static constexpr uint64_t kWords = kChunkValues / kWordBits;
  alignas(64) uint64_t plus[kWords];
  alignas(64) uint64_t minus[kWords];

  // Puts n trits after the first `at`. The first call has at = 0; each next call continues the
  // last. find(plus, minus) writes them from the lowest bit of a word on.
  template <typename Find>
  void append(uint64_t at, uint64_t n, const Find& find) {
    if (at % kWordBits == 0) return find(plus + at / kWordBits, minus + at / kWordBits);
    TritBits piece;
    find(piece.plus, piece.minus);
    append(at, piece, n);
  }
  void append(uint64_t at, const TritBits& trits, uint64_t n);
};

// Payload of every codec whose values are -m, 0 or +m (spec/format.md, Ternary payloads):
//   scale f32 of each group | sizes of the chunks | chunks of coded trits
struct TernaryShape : ChunkedShape {
  TernaryCoder coder;

  // group_size: values that share a scale, a multiple of 5, and of 4 for kTwoBit; 0: all.
  TernaryShape(uint64_t n, TernaryCoder coder, uint64_t group_size);
};

// Codes the n trits of a chunk into `slot`, which has room for them (TernaryShape). Returns the
// size.
uint64_t code_trits(TernaryCoder coder, const TritBits& trits, uint64_t n, uint8_t* slot,
                    const Kernels& kernels);

// As ChunkedCodec::decode_chunk.
bool decode_trits(TernaryCoder coder, const Decoding& decoding, uint64_t chunk,
                  std::span<const uint8_t> bytes, float* out);

// A codec C of trits. P has the members `coder` and `group_size`.
template <typename C, typename P>
class TernaryCodec : public CodecOf<C, P, ChunkedCodec> {
 public:
  using CodecOf<C, P, ChunkedCodec>::CodecOf;

  bool is_coarse() const noexcept override { return true; }

 protected:
  ChunkedShape shape(uint64_t n) const override {
    return TernaryShape(n, this->parameters().coder, this->parameters().group_size);
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    return decode_trits(this->parameters().coder, decoding, chunk, bytes, out);
  }
};

}  // namespace gradwire
