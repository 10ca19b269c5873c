#include "codecs/topk2bit/topk2bit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <string>

#include "codecs/checks.h"
#include "codecs/chunked_codec.h"
#include "codecs/registry.h"
#include "codecs/ternary.h"
#include "codecs/threshold.h"
#include "stages/element/float_bits.h"
#include "stages/element/output.h"
#include "stages/kernels.h"
#include "stages/threshold/sample.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"density", "0.02", "[0.0001, 1)", "share of each 4096 values that is sent: the largest ones"},
};

constexpr float kLeastDensity = 0.0001f;
// Thresholds that are tried, each lower than the one before, until all values are put in order.
constexpr int kGuesses = 24;
constexpr float kLower = 0.85f;
static_assert(kChunkValues % kTopk2bitGroup == 0);

// A chunk is two magnitudes, the size of the trits, the trits, and a bit for each that is not 0.
constexpr uint64_t kMagnitudesBytes = 2 * sizeof(float);
constexpr uint64_t kHeadBytes = kMagnitudesBytes + sizeof(uint16_t);

constexpr uint64_t bytes_of_bits(uint64_t bits) { return (bits + 7) / 8; }

// The values of a chunk that are sent: their places, in order, and their signs as trits.
struct Sent {
  uint64_t count = 0;
  uint16_t places[kChunkValues];
  TritBits trits;
};

// The values of a group whose magnitudes reach a threshold.
struct Candidates {
  uint64_t count = 0;
  uint16_t places[kTopk2bitGroup];
  float magnitudes[kTopk2bitGroup];
  uint32_t reordered[kTopk2bitGroup];  // the bits of the same magnitudes, for at_rank

  void find(const float* b, uint64_t n, float threshold, const Kernels& kernels) {
    uint64_t mask[kTopk2bitGroup / kWordBits];
    kernels.threshold_bits(b, n, threshold, mask);
    count = 0;
    for_each_set_bit(mask, n, [&](uint64_t i) {
      places[count] = static_cast<uint16_t>(i);
      magnitudes[count] = float_of(magnitude_bits(b[i]));
      reordered[count] = magnitude_bits(magnitudes[count]);
      ++count;
    });
  }

  // The magnitude at `rank` < count, where 0 is the largest.
  float at_rank(uint64_t rank) {
    std::nth_element(reordered, reordered + rank, reordered + count, std::greater<>());
    return float_of(reordered[rank]);
  }
};

// Adds the values of largest magnitude among the n of a group, which begins at place `first` of the
// chunk. Of equal magnitudes the first are taken. A zero is never sent.
//
// guess: a magnitude that about as many values may reach; becomes one for the next group. It does
// not change the result: it is lowered until enough values reach it, so that few have to be put in
// order.
void take_largest(const float* b, uint64_t first, uint64_t n, float density, const Kernels& kernels,
                  float& guess, Sent& sent) {
  const uint64_t rank = sample_rank(density, n);  // of the last value that may be sent
  Candidates found;
  for (int i = 0; i < kGuesses && found.count <= rank; ++i, guess *= kLower) {
    found.find(b, n, least_threshold(guess), kernels);
  }
  if (found.count <= rank) found.find(b, n, least_threshold(0.0f), kernels);
  const float least = found.count <= rank ? 0.0f : found.at_rank(rank);
  uint64_t equal = rank + 1;  // so many of the magnitude `least` are sent
  for (uint64_t i = 0; i < found.count; ++i) equal -= found.magnitudes[i] > least ? 1 : 0;
  for (uint64_t i = 0; i < found.count; ++i) {
    if (found.magnitudes[i] < least || (found.magnitudes[i] == least && equal == 0)) continue;
    equal -= found.magnitudes[i] == least ? 1 : 0;
    sent.places[sent.count++] = static_cast<uint16_t>(first + found.places[i]);
  }
  if (least > 0.0f) guess = least;
}

// The two magnitudes that stand for those of the values sent: the mean of the magnitudes up to
// their mean, and that of the others.
struct TwoMagnitudes {
  double mean = 0.0;
  float low = 0.0f;
  float high = 0.0f;

  TwoMagnitudes(const float* b, const Sent& sent) {
    double sum = 0.0;
    for (uint64_t i = 0; i < sent.count; ++i) sum += std::abs(b[sent.places[i]]);
    mean = sent.count == 0 ? 0.0 : sum / static_cast<double>(sent.count);
    double sums[2] = {};
    uint64_t counts[2] = {};
    for (uint64_t i = 0; i < sent.count; ++i) {
      const float magnitude = std::abs(b[sent.places[i]]);
      sums[is_high(magnitude) ? 1 : 0] += magnitude;
      ++counts[is_high(magnitude) ? 1 : 0];
    }
    const auto mean_of = [&](int i) {
      return static_cast<float>(sums[i] / static_cast<double>(counts[i]));
    };
    if (counts[0] > 0) low = mean_of(0);
    high = counts[1] > 0 ? mean_of(1) : low;
  }

  [[nodiscard]] bool is_high(float magnitude) const { return magnitude > mean; }
  [[nodiscard]] float of(float magnitude) const { return is_high(magnitude) ? high : low; }
};

class Topk2bitCodec final : public CodecOf<Topk2bitCodec, Topk2bitParameters, ChunkedCodec> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 21,
      .name = "topk2bit",
      .summary = "the largest of each 4096 values, each as its sign and one of two magnitudes",
      .source = "SparseLoCo (Sarfi, Therien, Lidin, Belilovsky; 2025, arXiv:2508.15706)",
      .error_feedback = true,
      .parameters = kParameters,
  };
  using CodecOf::CodecOf;

  bool is_coarse() const noexcept override { return true; }

  static Topk2bitParameters parse(Parameters& given) {
    return {.density = given.number("density", kLeastDensity, 1.0f, Topk2bitParameters().density)};
  }

  static Result<Topk2bitParameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_a, 0));
    Topk2bitParameters parameters;
    const float density = float_of(wire.param_b);
    if (density >= kLeastDensity && density < 1.0f) parameters.density = density;
    return parameters;
  }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id, .param_b = bits_of(parameters().density)};
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_parameter(text, "density", format_number(parameters().density));
    return text;
  }

  ChunkedShape shape(uint64_t n) const override {
    return {Groups(n, 0), 0, [](uint64_t values) {
              return ChunkSize(kHeadBytes,
                               kHeadBytes + packed_size(values) + bytes_of_bits(values));
            }};
  }

  Result<uint64_t> encode_values(const Input& input, const Measurement& measured,
                                 const DrawContext& draw, std::span<std::byte> payload,
                                 Execution& execution, std::span<float> decoded) const override {
    Result<uint64_t> size =
        ChunkedCodec::encode_values(input, measured, draw, payload, execution, decoded);
    return measured.largest == 0 ? 0 : size;
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Input& input = encoding.input;
    const uint64_t begin = encoding.shape.chunks.begin(chunk);
    const uint64_t n = encoding.shape.chunks.values(chunk);
    float buffer[kChunkValues];
    const float* b = input.load(begin, n, buffer);
    Sent sent;
    float guess = 0.5f * float_of(encoding.measured.largest);
    for (uint64_t first = 0; first < n; first += kTopk2bitGroup) {
      const uint64_t values = std::min(kTopk2bitGroup, n - first);
      take_largest(b + first, first, values, parameters().density, input.kernels(), guess, sent);
    }
    const TwoMagnitudes magnitudes(b, sent);
    auto* head = reinterpret_cast<std::byte*>(slot);
    store_le_f32(head, magnitudes.low);
    store_le_f32(head + sizeof(float), magnitudes.high);

    std::fill_n(sent.trits.plus, trit_words(n), 0);
    std::fill_n(sent.trits.minus, trit_words(n), 0);
    for (uint64_t i = 0; i < sent.count; ++i) {
      const float value = b[sent.places[i]];
      set_trit(sent.trits.plus, sent.trits.minus, sent.places[i], value < 0.0f ? -1 : 1);
    }
    uint8_t* const codes = slot + kHeadBytes;
    const uint64_t size =
        encoding.kernels().rice_encode(sent.trits.plus, sent.trits.minus, n, codes);
    store_le(head + kMagnitudesBytes, static_cast<uint16_t>(size));

    uint8_t* const bits = codes + size;
    std::fill_n(bits, bytes_of_bits(sent.count), 0);
    for (uint64_t i = 0; i < sent.count; ++i) {
      const bool is_high = magnitudes.is_high(std::abs(b[sent.places[i]]));
      if (is_high) bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1U << i % 8);
    }
    if (input.keeps_residual()) {
      for (uint64_t i = 0; i < sent.count; ++i) {
        float& left = buffer[sent.places[i]];
        left -= std::copysign(magnitudes.of(std::abs(left)), left);
      }
      input.store(begin, n, buffer);
    }
    return kHeadBytes + size + bytes_of_bits(sent.count);
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    const uint64_t n = decoding.shape.chunks.values(chunk);
    if (bytes.size() < kHeadBytes) return false;
    const auto* head = reinterpret_cast<const std::byte*>(bytes.data());
    const float magnitudes[] = {load_le_f32(head), load_le_f32(head + sizeof(float))};
    for (const float magnitude : magnitudes) {
      if (bits_of(magnitude) >= kNonFiniteBits) return false;  // the sign bit is above all others
    }
    const auto size = load_le<uint16_t>(head + kMagnitudesBytes);
    if (size > bytes.size() - kHeadBytes) return false;
    TritBits trits;
    const uint8_t* const codes = bytes.data() + kHeadBytes;
    if (!decoding.kernels.rice_decode(codes, size, n, trits.plus, trits.minus)) return false;

    const uint64_t words = trit_words(n);
    uint64_t count = 0;
    for (uint64_t word = 0; word < words; ++word) {
      trits.plus[word] |= trits.minus[word];  // now: which values are sent
      count += static_cast<uint64_t>(std::popcount(trits.plus[word]));
    }
    if (bytes.size() != kHeadBytes + size + bytes_of_bits(count)) return false;
    const uint8_t* const bits = codes + size;
    if (count % 8 != 0 && bits[count / 8] >> count % 8 != 0) return false;

    if (decoding.stores()) std::fill_n(out, n, 0.0f);
    scalar::with_output(out, decoding.mode, [&](auto to) {
      uint64_t i = 0;
      for_each_set_bit(trits.plus, n, [&](uint64_t place) {
        const float magnitude = magnitudes[bits[i / 8] >> i % 8 & 1];
        const bool is_negative = (trits.minus[place / kWordBits] >> place % kWordBits & 1) != 0;
        to.put(is_negative ? -magnitude : magnitude, place);
        ++i;
      });
    });
    return true;
  }
};

}  // namespace

const CodecEntry codec_entries::topk2bit = entry<Topk2bitCodec>();

}  // namespace gradwire
