#include "codecs/qgd/qgd.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "codecs/checks.h"
#include "codecs/reached_trits.h"
#include "codecs/ternary.h"
#include "codecs/threshold.h"
#include "stages/element/float_bits.h"
#include "stages/levels/levels.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"coder", "rice", "rice|zre|none",
     "gaps in Golomb-Rice code, or five values to a byte with zero-run coding, or without"},
};

// A value by its magnitude and place.
struct Component {
  float magnitude;
  uint64_t place;

  // Whether it is sent before the other one. The bits of magnitudes are in their order, and order
  // NaN too, which may come from another thread while the values are sorted.
  [[nodiscard]] bool before(const Component& other) const {
    const uint32_t bits = bits_of(magnitude);
    const uint32_t other_bits = bits_of(other.magnitude);
    return bits != other_bits ? bits > other_bits : place < other.place;
  }
};

// The root of n, rounded up.
uint64_t root_of(uint64_t n) {
  auto root = static_cast<uint64_t>(std::sqrt(static_cast<double>(n)));
  while (root * root < n) ++root;
  return root;
}

// The values that come first, `count` at most, in their order. Zeros are left out.
std::vector<Component> find_first(const Input& input, uint64_t count) {
  const auto before = [](const Component& a, const Component& b) { return a.before(b); };
  std::vector<Component> found;
  float least = std::numeric_limits<float>::denorm_min();  // smaller values are not needed
  const auto keep_first = [&] {
    if (found.size() <= count) return;
    const auto end = found.begin() + static_cast<ptrdiff_t>(count);
    std::nth_element(found.begin(), end - 1, found.end(), before);
    found.erase(end, found.end());
    least = found.back().magnitude;
  };
  uint64_t mask[Input::kPartValues / kWordBits];
  input.for_each_part(0, input.size(), [&](uint64_t first, uint64_t n, const float* b) {
    input.kernels().threshold_bits(b, n, least, mask);
    for_each_set_bit(mask, n, [&](uint64_t i) {
      found.push_back({.magnitude = std::abs(b[i]), .place = first + i});
    });
    if (found.size() >= 2 * count + Input::kPartValues) keep_first();
  });
  keep_first();
  std::ranges::sort(found, before);
  return found;
}

// The last of the values that are sent: the first value, in order, at which the sum of magnitudes
// reaches the norm. The input is not all zeros, unless another thread has cleared it meanwhile:
// then no value.
Component last_sent(const Input& input, float norm) {
  // In exact arithmetic the first sqrt(n) magnitudes reach the norm.
  const std::vector<Component> first = find_first(input, root_of(input.size()));
  double sum = 0;
  for (const Component& component : first) {
    sum += component.magnitude;
    if (static_cast<float>(sum) >= norm) return component;
  }
  return first.empty() ? Component{.magnitude = FLT_MAX, .place = 0} : first.back();
}

class QgdCodec final : public TernaryCodec<QgdCodec, QgdParameters> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 20,
      .name = "qgd",
      .summary = "the largest values up to the norm in sum, each as its sign times the norm",
      .source =
          "QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic; NIPS 2017), section 3.3, gradient "
          "descent",
      .takes_feedback = false,
      .parameters = kParameters,
  };
  using TernaryCodec::TernaryCodec;

  static QgdParameters parse(Parameters& given) {
    return {.coder = given.choice("coder", kTernaryCoders, QgdParameters().coder)};
  }

  static std::string why_no_feedback(const QgdParameters&) {
    return "a value is sent as the norm of all values, so what error feedback keeps would grow "
           "without bound; leave ef out, or take stc, which sends the mean of the largest values";
  }

  static Result<QgdParameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(
        check_wire_bits(kInfo, wire.param_a, static_cast<uint32_t>(TernaryCoder::kRice)));
    if (wire.param_b != 0) {
      return Status(StatusCode::kReservedBits,
                    "qgd: param_b " + std::to_string(wire.param_b) + " is reserved");
    }
    return QgdParameters{.coder = static_cast<TernaryCoder>(wire.param_a)};
  }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id, .param_a = static_cast<uint16_t>(parameters().coder)};
  }

  // The norm of n equal values is sqrt(n) times as large as they are.
  float scale_growth() const noexcept override { return std::numeric_limits<float>::infinity(); }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_choice(text, "coder", kTernaryCoders, parameters().coder, QgdParameters().coder);
    return text;
  }

  // sums[0] is the sum of squares, as stages/magnitude/moments.h defines it.
  Measurement measure_group(const Input& input, uint64_t begin, uint64_t n) const override {
    float buffer[kChunkValues];
    const Moments moments = input.kernels().moments(input.load(begin, n, buffer), n);
    return {.largest = moments.largest, .sums = {moments.squares}};
  }

  // Afterwards sums[0] is the norm, sums[1] the place of the last value that is sent, and `largest`
  // its magnitude.
  Result<Measurement> measure_values(const Input& input, std::span<const Measurement> chunks,
                                     Execution& execution) const override {
    Result<Measurement> found = TernaryCodec::measure_values(input, chunks, execution);
    if (!found.ok() || found.value().largest == 0) return found;
    Measurement& measured = found.value();
    const float norm = l2_norm_of(measured.sums[0]);
    const Component last = last_sent(input, norm);
    measured.largest = bits_of(last.magnitude);
    measured.sums[0] = norm;
    measured.sums[1] = static_cast<double>(last.place);
    return found;
  }

  void put_head(const Measurement& group, uint64_t, const Encoding&,
                std::byte* head) const override {
    store_le_f32(head, static_cast<float>(group.sums[0]));
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Component last = {.magnitude = float_of(encoding.measured.largest),
                            .place = static_cast<uint64_t>(encoding.measured.sums[1])};
    const auto norm = static_cast<float>(encoding.measured.sums[0]);
    TritBits trits;
    find_reached_trits(encoding, chunk, last.magnitude, norm, trits,
                       [&last](float value, uint64_t place) {
                         return !last.before({.magnitude = std::abs(value), .place = place});
                       });
    return code_trits(parameters().coder, trits, encoding.shape.chunks.values(chunk), slot,
                      encoding.kernels());
  }
};

}  // namespace

const CodecEntry codec_entries::qgd = entry<QgdCodec>();

}  // namespace gradwire
