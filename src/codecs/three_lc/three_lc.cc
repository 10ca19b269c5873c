#include "codecs/three_lc/three_lc.h"

#include <algorithm>

#include "codecs/checks.h"
#include "codecs/ternary.h"
#include "codecs/ternary_parameters.h"
#include "stages/ternary/nearest_trit.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"s", "1", "[1, 2)", "sparsity multiplier: larger sends fewer values, each standing for more"},
    {"coder", "zre", "zre|rice|none",
     "zero-run coding of the packed trits; gaps in Golomb-Rice code (smaller); or none"},
    {"bucket", "whole", "multiple of 5",
     "values that share a scale; by default the whole segment has one"},
};

constexpr float kSparsityUnits = 16384.0f;  // param_a holds (s - 1) times this

class ThreeLcCodec final : public TernaryCodec<ThreeLcCodec, ThreeLcParameters> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 16,
      .name = "3lc",
      .summary = "three values with a sparsity multiplier, five to a byte, zero runs shortened",
      .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 3",
      .error_feedback = true,
      .parameters = kParameters,
  };
  using TernaryCodec::TernaryCodec;

  static ThreeLcParameters parse(Parameters& given) {
    return {.sparsity = given.number("s", 1.0f, 2.0f, 1.0f),
            .coder = given.choice("coder", kTernaryCoders, TernaryCoder::kZeroRun),
            .group_size = given.group_size(kTritsPerByte, 0)};
  }

  static Result<ThreeLcParameters> read(const WireCodec& wire, Dtype) {
    const TernaryCoder coder = stated_coder(wire.param_a);
    if (coder == TernaryCoder::kTwoBit) {
      return Status(StatusCode::kReservedBits, "3lc: coder 3 is reserved");
    }
    GW_RETURN_IF_ERROR(check_wire_group_size(kInfo, wire, kTritsPerByte));
    return ThreeLcParameters{
        .sparsity = std::min(
            static_cast<float>(1 + stated_number(wire.param_a, kSparsityUnits, 1e4)), 1.9999f),
        .coder = coder,
        .group_size = wire.param_b};
  }

  WireCodec wire() const noexcept override {
    return {
        .id = kInfo.id,
        .param_a = pack_param_a(parameters().coder, parameters().sparsity - 1.0f, kSparsityUnits),
        .param_b = parameters().group_size};
  }

  // The multiplier m is s times the largest magnitude.
  // With M the largest magnitude of x + residual, the residual stays within s / 2 M, so M is at
  // most |x| / (1 - s / 2), and the decoded values are s M.
  float scale_growth() const noexcept override {
    const float s = parameters().sparsity;
    return residual_type() == ResidualType::kNone ? s : s / (1 - s / 2);
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_parameter(text, "s", format_number(parameters().sparsity));
    append_choice(text, "coder", kTernaryCoders, parameters().coder, TernaryCoder::kZeroRun);
    append_group_size(text, parameters().group_size, 0);
    return text;
  }

  // A group's head is its multiplier m.
  void put_head(const Measurement& group, uint64_t, const Encoding&,
                std::byte* head) const override {
    store_le_f32(head, ternary_multiplier(group.largest, parameters().sparsity));
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Kernels& kernels = encoding.kernels();
    const uint64_t n = encoding.shape.chunks.values(chunk);
    if (parameters().coder == TernaryCoder::kRice) {
      TritBits trits;
      find_trits(encoding, chunk, trits);
      return kernels.rice_encode(trits.plus, trits.minus, n, slot);
    }
    if (parameters().coder == TernaryCoder::kNone) {
      pack(encoding, chunk, slot);
      return packed_size(n);
    }
    if (encoding.shape.groups.count == 1 && encoding.input.is_f32()) {
      return pack_zero_runs(encoding, chunk, slot);
    }
    alignas(64) uint8_t packed[kChunkValues / kTritsPerByte];
    pack(encoding, chunk, packed);
    return kernels.zero_run_encode(packed, packed_size(n), slot);
  }

 private:
  // Quantizes a chunk, five trits to a byte.
  static void pack(const Encoding& encoding, uint64_t chunk, uint8_t* packed) {
    static_assert(Input::kPartValues % kTritsPerByte == 0);
    encoding.for_each_piece(chunk, [&](uint64_t group, uint64_t begin, uint64_t at, uint64_t n) {
      const float m = encoding.scale(group);
      encoding.input.with_residual(
          begin, n, [&](uint64_t first, uint64_t count, const float* x, ResidualValues r) {
            encoding.kernels().ternary_pack(x, r, count, m, packed + (at + first) / kTritsPerByte);
          });
    });
  }

  // The same and zero-run coding in one pass, for float32 values with one scale.
  static uint64_t pack_zero_runs(const Encoding& encoding, uint64_t chunk, uint8_t* codes) {
    uint64_t size = 0;
    encoding.input.with_residual(
        encoding.shape.chunks.begin(chunk), encoding.shape.chunks.values(chunk),
        [&](uint64_t, uint64_t n, const float* x, ResidualValues r) {
          size = encoding.kernels().ternary_encode(x, r, n, encoding.scale(0), codes);
        });
    return size;
  }

  // Quantizes a chunk to bits.
  static void find_trits(const Encoding& encoding, uint64_t chunk, TritBits& trits) {
    encoding.for_each_piece(chunk, [&](uint64_t group, uint64_t begin, uint64_t at, uint64_t n) {
      const float m = encoding.scale(group);
      encoding.input.with_residual(
          begin, n, [&](uint64_t first, uint64_t count, const float* x, ResidualValues r) {
            trits.append(at + first, count, [&](uint64_t* plus, uint64_t* minus) {
              encoding.kernels().trit_bits(x, r, count, m, plus, minus);
            });
          });
    });
  }
};

}  // namespace

const CodecEntry codec_entries::three_lc = entry<ThreeLcCodec>();

}  // namespace gradwire
