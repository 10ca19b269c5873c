#include "codecs/topk/topk.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <string>

#include "codecs/checks.h"
#include "codecs/chunked_codec.h"
#include "codecs/registry.h"
#include "codecs/threshold.h"
#include "stages/element/bfloat16.h"
#include "stages/element/float_bits.h"
#include "stages/element/output.h"
#include "stages/kernels.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"ratio", "0.05", "[0.0001, 1]",
     "share of the values that is sent, about: the largest ones; 1: all but the zeros"},
    {"values", "f32", "f32|bf16", "how they are sent"},
    {"index", "bitmap", "bitmap|rice",
     "where they stand: a bit for each value, or gaps in Golomb-Rice code, smaller below a half"},
};

// param_a: bit 0 the type of the values, bit 1 the coder of the index.
constexpr int kIndexShift = 1;
constexpr uint16_t kKnownBits = 3;

constexpr std::string_view kSentAs[] = {"f32", "bf16"};
constexpr std::string_view kIndexCoders[] = {"bitmap", "rice"};
constexpr float kLeastRatio = 0.0001f;
constexpr float kAboveMostRatio = 0x1.000002p0f;  // the next after 1
constexpr uint64_t kChunkWords = kChunkValues / 64;
static_assert(Input::kPartValues % 64 == 0);

uint64_t map_size(uint64_t values) { return (values + 7) / 8; }

class TopkCodec final : public CodecOf<TopkCodec, TopkParameters, ChunkedCodec> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 6,
      .name = "topk",
      .summary = "the largest values alone, and where they stand",
      .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 4.2, \"5% sparsification\"",
      .error_feedback = true,
      .parameters = kParameters,
  };
  using CodecOf::CodecOf;

  bool is_coarse() const noexcept override { return parameters().ratio < 0.5f; }

  static TopkParameters parse(Parameters& given) {
    const TopkParameters defaults;
    return {.ratio = given.number("ratio", kLeastRatio, kAboveMostRatio, defaults.ratio,
                                  "in [0.0001, 1]"),
            .values = given.choice("values", kSentAs, defaults.values),
            .index = given.choice("index", kIndexCoders, defaults.index)};
  }

  static Result<TopkParameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_a, kKnownBits));
    TopkParameters parameters;
    const float ratio = float_of(wire.param_b);
    if (ratio >= kLeastRatio && ratio <= 1.0f) parameters.ratio = ratio;
    parameters.values = static_cast<SentAs>(wire.param_a & 1);
    parameters.index = static_cast<IndexCoder>(wire.param_a >> kIndexShift);
    return parameters;
  }

  WireCodec wire() const noexcept override {
    const int index = static_cast<int>(parameters().index) << kIndexShift;
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(static_cast<int>(parameters().values) | index),
            .param_b = bits_of(parameters().ratio)};
  }

  Status check_size(uint64_t n, uint64_t size) const override {
    const ChunkShape chunks = shape(n).chunks;
    // At least one value is sent.
    return check_chunks_size(kInfo.name, chunks, chunks.least_size + 1, size);
  }

 protected:
  std::string parameter_text() const override {
    const TopkParameters defaults;
    std::string text;
    append_parameter(text, "ratio", format_number(parameters().ratio));
    append_choice(text, "values", kSentAs, parameters().values, defaults.values);
    append_choice(text, "index", kIndexCoders, parameters().index, defaults.index);
    return text;
  }

  uint32_t refused_magnitude(ResidualType) const noexcept override {
    return sends_f32() ? kNonFiniteBits : kRoundsToInfinity;
  }

  // A chunk holds its index and then its values.
  ChunkedShape shape(uint64_t n) const override {
    return {Groups(n, 0), 0, [this](uint64_t values) {
              return ChunkSize(is_rice() ? kIndexSizeBytes : map_size(values),
                               index_room(values) + values * width());
            }};
  }

  // sums[0] is the threshold.
  Result<Measurement> measure_values(const Input& input, std::span<const Measurement> chunks,
                                     Execution& execution) const override {
    Result<Measurement> found = ChunkedCodec::measure_values(input, chunks, execution);
    if (found.ok()) found.value().sums[0] = sample_threshold(input, parameters().ratio);
    return found;
  }

  Result<uint64_t> encode_values(const Input& input, const Measurement& measured,
                                 const DrawContext& draw, std::span<std::byte> payload,
                                 Execution& execution, std::span<float> decoded) const override {
    Result<uint64_t> size =
        ChunkedCodec::encode_values(input, measured, draw, payload, execution, decoded);
    return measured.largest == 0 ? 0 : size;
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Kernels& kernels = encoding.kernels();
    const Input& input = encoding.input;
    const auto threshold = static_cast<float>(encoding.measured.sums[0]);
    const uint64_t begin = encoding.shape.chunks.begin(chunk);
    const uint64_t n = encoding.shape.chunks.values(chunk);
    uint64_t mask[kChunkWords];
    uint8_t* const first_value = slot + index_room(n);
    uint8_t* end = first_value;
    float sent[Input::kPartValues];
    for (uint64_t first = 0; first < n; first += Input::kPartValues) {
      const uint64_t values = std::min(Input::kPartValues, n - first);
      uint64_t* words = mask + first / 64;
      uint64_t count = 0;
      input.with_residual(begin + first, values,
                          [&](uint64_t, uint64_t n_here, const float* x, ResidualValues r) {
                            count = kernels.take_large(x, r, n_here, threshold, words, sent);
                          });
      if (sends_f32()) {
        std::copy_n(reinterpret_cast<const uint8_t*>(sent), count * sizeof(float), end);
      } else {
        const auto* narrow = reinterpret_cast<const uint16_t*>(end);
        kernels.narrow_bf16(sent, count, reinterpret_cast<uint16_t*>(end));
        const float* value = sent;
        for_each_set_bit(words, values, [&](uint64_t i) {
          input.store(begin + first + i, *value++ - widen_bf16(load_unaligned(narrow++)));
        });
      }
      end += count * width();
    }
    const uint64_t index = write_index(mask, n, slot, kernels);
    const auto values = static_cast<uint64_t>(end - first_value);
    if (slot + index != first_value) std::memmove(slot + index, first_value, values);
    return index + values;
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    const uint64_t n = decoding.shape.chunks.values(chunk);
    uint64_t mask[kChunkWords];
    const uint64_t index = read_index(bytes, n, mask, decoding.kernels);
    if (index == 0) return false;
    uint64_t count = 0;
    for (uint64_t word = 0; word * 64 < n; ++word) {
      count += static_cast<uint64_t>(std::popcount(mask[word]));
    }
    if (bytes.size() != index + count * width()) return false;
    const uint8_t* from = bytes.data() + index;
    if (decoding.stores()) std::fill_n(out, n, 0.0f);
    // A stored value has the bits that were sent: adding it to 0 would change -0.0 and some NaNs.
    scalar::with_output(out, decoding.mode, [&](auto to) {
      const auto put = [&](const auto* value, const auto& widen) {
        for_each_set_bit(mask, n, [&](uint64_t i) { to.put(widen(load_unaligned(value++)), i); });
      };
      if (sends_f32()) return put(reinterpret_cast<const float*>(from), std::identity());
      put(reinterpret_cast<const uint16_t*>(from), widen_bf16);
    });
    return true;
  }

 private:
  [[nodiscard]] bool sends_f32() const { return parameters().values == SentAs::kFloat32; }
  [[nodiscard]] uint64_t width() const { return sends_f32() ? sizeof(float) : sizeof(uint16_t); }
  [[nodiscard]] bool is_rice() const { return parameters().index == IndexCoder::kRice; }

  [[nodiscard]] uint64_t index_room(uint64_t values) const {
    return is_rice() ? kIndexSizeBytes + packed_size(values) : map_size(values);
  }

  // Writes the index of the values that are sent among n; returns its size.
  uint64_t write_index(const uint64_t* mask, uint64_t n, uint8_t* out,
                       const Kernels& kernels) const {
    if (!is_rice()) {
      std::memcpy(out, mask, map_size(n));
      return map_size(n);
    }
    constexpr uint64_t kNone[kChunkWords] = {};
    const uint64_t size = kernels.rice_encode(mask, kNone, n, out + kIndexSizeBytes);
    store_le(reinterpret_cast<std::byte*>(out), static_cast<uint16_t>(size));
    return kIndexSizeBytes + size;
  }

  // Reads an index; returns its size, or 0 where its bytes are not valid.
  uint64_t read_index(std::span<const uint8_t> bytes, uint64_t n, uint64_t* mask,
                      const Kernels& kernels) const {
    if (is_rice()) {
      if (bytes.size() < kIndexSizeBytes) return 0;
      const auto size = load_le<uint16_t>(reinterpret_cast<const std::byte*>(bytes.data()));
      if (size > bytes.size() - kIndexSizeBytes) return 0;
      uint64_t minus[kChunkWords];
      const auto* codes = bytes.data() + kIndexSizeBytes;
      if (!kernels.rice_decode(codes, size, n, mask, minus)) return 0;
      const bool plus_alone =
          std::all_of(minus, minus + trit_words(n), [](uint64_t word) { return word == 0; });
      return plus_alone ? kIndexSizeBytes + size : 0;
    }
    if (bytes.size() < map_size(n)) return 0;
    mask[(n - 1) / 64] = 0;
    std::memcpy(mask, bytes.data(), map_size(n));
    const bool padded = n % 64 != 0;
    return padded && (mask[n / 64] >> n % 64) != 0 ? 0 : map_size(n);
  }
};

}  // namespace

const CodecEntry codec_entries::topk = entry<TopkCodec>();

}  // namespace gradwire
