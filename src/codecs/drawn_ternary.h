#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include "codecs/checks.h"
#include "codecs/ternary.h"
#include "codecs/ternary_parameters.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// The sizes of groups of drawn trits are multiples of this, to fill whole words and packed bytes.
inline constexpr uint32_t kDrawnGroupMultiple = 320;

// Encodes one chunk with trits that are drawn (TernGrad, section 3): a value, clipped to `limit`,
// gives its sign with the probability |clipped value| / scale of its group.
uint64_t draw_chunk(TernaryCoder coder, const Encoding& encoding, float limit, uint64_t chunk,
                    uint8_t* slot);

// The range of the values of a tensor for ranks that share scales.
struct TernaryRange {
  float limit;    // values are clipped to `clip` times the standard deviation (clip 0: no limit)
  float largest;  // magnitude after clipping
};

// Step 1. Returns nothing where x, which is not empty, holds NaN or Inf.
std::optional<TernaryRange> measure_range(float clip, const InputView& x, Execution& execution);

// Step 2, if there are groups: writes the scale f32 of each group of x.
void measure_group_scales(const TernaryShape& shape, float limit, const InputView& x,
                          std::byte* scales, Execution& execution);

// Step 3: draws with the scales at the head of `payload`, none below the scale of x. Returns the
// payload's size: 0 where all scales are 0.
uint64_t draw_with_scales(const TernaryShape& shape, float limit, const InputView& x,
                          const DrawContext& draw, std::span<std::byte> payload,
                          Execution& execution);

// The moments of n values, as measure_chunks adds them up; and the limit that all are clipped to.
Measurement measure_moments(const Input& input, uint64_t begin, uint64_t n);
float clipping_limit_of(const Measurement& moments, uint64_t n, float clip);

// A codec C of drawn trits. P has the members `clip`, `coder` and `group_size`.
template <typename C, typename P>
class DrawnTernaryCodec : public TernaryCodec<C, P> {
 public:
  using TernaryCodec<C, P>::TernaryCodec;

  static std::string why_no_feedback(const P&) { return std::string(kNoFeedbackForDrawnTrits); }

 protected:
  // Without clipping, moments aren't needed, and encoding is one pass for each group.
  bool measures_chunks(uint64_t n) const noexcept override {
    return clips() || TernaryCodec<C, P>::measures_chunks(n);
  }

  Measurement measure_part(const Input& input, uint64_t begin, uint64_t n) const override {
    return clips() ? measure_moments(input, begin, n)
                   : TernaryCodec<C, P>::measure_part(input, begin, n);
  }

  Result<Measurement> measure_values(const Input& input, std::span<const Measurement> chunks,
                                     Execution& execution) const override {
    Result<Measurement> found = TernaryCodec<C, P>::measure_values(input, chunks, execution);
    if (clips() && found.ok()) {
      found.value().sums[0] =
          clipping_limit_of(found.value(), input.size(), this->parameters().clip);
    }
    return found;
  }

  void put_head(const Measurement& group, uint64_t, const Encoding& encoding,
                std::byte* head) const override {
    store_le_f32(head, std::min(float_of(group.largest), limit(encoding)));
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    return draw_chunk(this->parameters().coder, encoding, limit(encoding), chunk, slot);
  }

 private:
  [[nodiscard]] bool clips() const noexcept { return this->parameters().clip != 0.0f; }
  [[nodiscard]] float limit(const Encoding& encoding) const {
    return clips() ? static_cast<float>(encoding.measured.sums[0])
                   : std::numeric_limits<float>::max();
  }
};

}  // namespace gradwire
