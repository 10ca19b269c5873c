#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "gradwire/decode_mode.h"
#include "gradwire/execution.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

class Input;  // internal: x + residual, part by part

// The types of input values. float32 holds the values of the others exactly.
enum class Dtype : uint8_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

[[nodiscard]] constexpr uint64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

// The most values of a tensor segment (spec/format.md, limits).
inline constexpr uint64_t kMaxNumel = uint64_t{1} << 40;

// The values of a chunk, which is coded alone (spec/format.md, conventions).
inline constexpr uint64_t kChunkValues = 40960;

enum class ResidualType : uint8_t { kNone, kFloat32, kBfloat16 };

// The values to encode, read as float32.
class InputView {
 public:
  // Converts from everything that converts to a span of floats.
  template <typename Floats>
  requires std::convertible_to<const Floats&, std::span<const float>> InputView(
      const Floats& floats)
      : InputView(std::span<const float>(floats)) {}
  InputView(std::span<const float> values) : data_(values.data()), size_(values.size()) {}
  // bits: kBfloat16 (the upper half of a float32) or kFloat16 (IEEE binary16).
  InputView(Dtype dtype, std::span<const uint16_t> bits)
      : dtype_(dtype), data_(bits.data()), size_(bits.size()) {}

  [[nodiscard]] Dtype dtype() const noexcept { return dtype_; }
  [[nodiscard]] uint64_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] const void* data() const noexcept { return data_; }
  [[nodiscard]] const float* f32() const noexcept { return static_cast<const float*>(data_); }
  [[nodiscard]] const uint16_t* u16() const noexcept { return static_cast<const uint16_t*>(data_); }

 private:
  Dtype dtype_ = Dtype::kFloat32;
  const void* data_ = nullptr;
  uint64_t size_ = 0;
};

// The residual of one segment, as long as the input, or none. Encoding adds it to the input and
// replaces it by the part of that sum which was not sent.
class ResidualView {
 public:
  ResidualView() = default;
  explicit ResidualView(std::span<float> values)
      : type_(ResidualType::kFloat32), data_(values.data()), size_(values.size()) {}
  explicit ResidualView(std::span<uint16_t> bfloat16_bits)
      : type_(ResidualType::kBfloat16), data_(bfloat16_bits.data()), size_(bfloat16_bits.size()) {}

  [[nodiscard]] ResidualType type() const noexcept { return type_; }
  [[nodiscard]] uint64_t size() const noexcept { return size_; }
  [[nodiscard]] float* f32() const noexcept { return static_cast<float*>(data_); }
  [[nodiscard]] uint16_t* bf16() const noexcept { return static_cast<uint16_t*>(data_); }

 private:
  ResidualType type_ = ResidualType::kNone;
  void* data_ = nullptr;
  uint64_t size_ = 0;
};

// Determines the random numbers of codecs that draw. (seed, stream) makes the key of the generator,
// (step, index of the value) its counter. Other codecs ignore it.
struct DrawContext {
  uint64_t seed = 0;
  uint64_t stream = 0;
  uint64_t step = 0;
};

// The codec and its parameters as the frame header holds them: all that a decoder needs beside the
// payload.
struct WireCodec {
  uint8_t id = 0;
  uint16_t param_a = 0;
  uint32_t param_b = 0;

  friend bool operator==(const WireCodec&, const WireCodec&) = default;
};

// What Codec::measure found out about x + residual, for Codec::encode. Only the codec itself
// interprets the numbers.
struct Measurement {
  // true: all values were read and are finite. false: encode measures for itself.
  bool complete = false;
  uint32_t largest = 0;  // magnitude bits
  uint64_t count = 0;
  double sums[2] = {0, 0};
};

// A function that receives values just after they were decoded, while they are in the cache: n
// values from `begin` on, which is a multiple of kChunkValues. Several threads may call it at once,
// each with other values.
using AfterChunk = std::function<void(uint64_t begin, uint64_t n)>;

struct CodecParameter {
  std::string_view name;
  std::string_view default_value;
  std::string_view values;  // what is accepted: "[1, 2)", "zre|none"
  std::string_view help;
};

struct CodecInfo {
  uint8_t id;
  std::string_view name;
  std::string_view summary;
  std::string_view source;      // paper and section
  bool error_feedback = false;  // the default of `ef`
  bool lossless = false;        // no error is left, so ef and residual are no keys
  // Whether some parameters allow error feedback: what it keeps then stays bounded.
  bool takes_feedback = true;
  bool draws = false;  // encoding draws random numbers, so DrawContext matters
  // Several ranks can encode with the same scales, and their symbols can be added without being
  // decoded (TernGrad, section 3, scaler sharing).
  bool shares_scales = false;
  bool carries_non_finite = false;  // without a residual, NaN and Inf are sent like other values
  std::span<const CodecParameter> parameters = {};
};

// A codec by what it is good for, such as "small". Codec::parse takes the name, and parameters
// after it, as if `codec` stood there.
struct CodecName {
  std::string_view name;
  std::string_view codec;
  std::string_view summary;
};

// The default of the key `ef`: CodecInfo::error_feedback, or off for a sender that has no next
// step.
enum class FeedbackDefault : uint8_t { kOfCodec, kOff };

// A named chain of stages with its parameters. Immutable; one object serves all threads.
class GRADWIRE_EXPORT Codec {
 public:
  // Parses a codec string such as "3lc:s=1.75,coder=zre", or a CodecName. All codecs but lossless
  // ones have the keys ef=on|off (error feedback) and residual=f32|bf16 (the residual's type).
  // kUnknownCodec, kBadParameter: the message lists what is valid.
  static Result<std::shared_ptr<const Codec>> parse(
      std::string_view text, FeedbackDefault feedback = FeedbackDefault::kOfCodec);

  // The codec of a received frame of values of `dtype`. kUnknownCodec, kReservedBits.
  static Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire,
                                                        Dtype dtype = Dtype::kFloat32);

  virtual ~Codec() = default;

  [[nodiscard]] virtual const CodecInfo& info() const noexcept = 0;
  // Canonical text: parse(text()) gives an equal codec. Defaults are left out, except 3lc's s,
  // topk's ratio and stc's density.
  [[nodiscard]] std::string text() const;
  // text() as a decoder can reconstruct it: without the keys of error feedback, which only the
  // sender needs.
  [[nodiscard]] std::string wire_text() const;
  [[nodiscard]] virtual WireCodec wire() const noexcept = 0;

  // The type of the residual that a compressor keeps. kNone: encode gets no residual.
  [[nodiscard]] ResidualType residual_type() const noexcept { return residual_type_; }

  // By how much the largest decoded magnitude can exceed the largest input, when a residual has
  // grown for long. In a ring, every hop encodes the sum so far, and the factors multiply.
  [[nodiscard]] virtual float scale_growth() const noexcept { return 1.0f; }

  // Whether a step sends a value rarely, or with an error as large as the value. Sums over steps
  // come out right, but not squares: an optimizer that divides by them (Adam) learns too slowly.
  [[nodiscard]] virtual bool is_coarse() const noexcept { return false; }

  // Upper bound of encode's result for n values, n <= kMaxNumel.
  [[nodiscard]] virtual uint64_t max_payload_size(uint64_t n) const noexcept = 0;

  // kCorruptPayload if no payload of `size` bytes can hold n values. So a decoder refuses it before
  // it allocates memory for them.
  virtual Status check_size(uint64_t n, uint64_t size) const = 0;

  // Finds what encode must know about all values before it encodes the first: their scale, and that
  // they are finite. The residual stays as it is. A codec that works group by group reads nothing
  // here and leaves `complete` false; its encode refuses values that are not finite.
  //   kNonFinite: x + residual holds a value that can't be encoded; the message names the first.
  //   kLengthMismatch: the residual is neither absent (kNone) nor as long as x.
  // `chunks`: the results of measure_chunk for all chunks, from callers that had the values in the
  // cache earlier. Without them measure reads all values.
  Result<Measurement> measure(const InputView& x, const ResidualView& residual,
                              Execution& execution, std::span<const Measurement> chunks = {}) const;

  // Whether measure can use measure_chunk's results for n values. If not, do not call
  // measure_chunk.
  [[nodiscard]] virtual bool measures_chunks(uint64_t n) const noexcept;
  // Measures the chunk that begins at value `begin`. `residual`: none, or as long as x.
  [[nodiscard]] Measurement measure_chunk(const InputView& x, const ResidualView& residual,
                                          uint64_t begin, Execution& execution) const;

  // Encodes x plus residual into payload and returns the payload's size in bytes. `measurement` is
  // what measure found for the same x and residual; without one, encode measures for itself.
  //   kBufferTooSmall: payload is smaller than max_payload_size(x.size()).
  //   kNonFinite, kLengthMismatch: as measure. Without a residual and a measurement, codecs that
  //     carry NaN and Inf (CodecInfo::carries_non_finite) send them.
  // `decoded`, unless it is empty, receives the values that the payload decodes to. It is as long
  // as x. It may be the memory of x if the measurement is complete, because encode cannot fail
  // then.
  // After a failure the residual is as it was. With a codec that has a scale for each group of
  // values, it is as `restore` leaves it.
  //
  // No other thread may write to x meanwhile. If one does, still nothing outside payload, residual
  // and decoded is written, and a failure is reported as such. But decoders may refuse the payload,
  // or find other values in it than x ever had, and the residual may hold NaN, which the next call
  // reports.
  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext& draw,
                          std::span<std::byte> payload, Execution& execution,
                          const Measurement& measurement = {}, std::span<float> decoded = {}) const;

  // Undoes encode's change of the residual: residual = (residual + decoded) - x, in float32, value
  // by value. That is the residual before encode, up to the rounding of x + residual. `payload` is
  // encode's result. Statuses as decode.
  Status restore(std::span<const std::byte> payload, const InputView& x,
                 const ResidualView& residual, Execution& execution) const;

  // Index of the first value of x + residual that encode refuses.
  [[nodiscard]] std::optional<uint64_t> find_non_finite(const InputView& x,
                                                        const ResidualView& residual,
                                                        Execution& execution) const;

  // Decodes a payload that came with this codec's wire parameters. Stores the values in `out` or
  // adds them to it; out.size() is the number of values. Any bytes are safe. After kCorruptPayload
  // `out` holds unspecified values. `after` is called for every chunk that was decoded.
  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution, const AfterChunk& after = {}) const;

 protected:
  explicit Codec(ResidualType residual_type) : residual_type_(residual_type) {}

  // The parts of measure, encode and decode that differ from codec to codec. Their callers have
  // checked that there are values and that the residual, if any, is as long as they are. They have
  // also checked that the payload has room, or that its size passed check_size and is not 0.
  virtual Result<Measurement> measure_values(const Input& input,
                                             std::span<const Measurement> chunks,
                                             Execution& execution) const;
  // Measures a part of the values for measure_values: by default the largest magnitude.
  [[nodiscard]] virtual Measurement measure_part(const Input& input, uint64_t begin,
                                                 uint64_t n) const;
  virtual Result<uint64_t> encode_values(const Input& input, const Measurement& measured,
                                         const DrawContext& draw, std::span<std::byte> payload,
                                         Execution& execution, std::span<float> decoded) const = 0;
  virtual Status decode_values(std::span<const std::byte> payload, std::span<float> out,
                               DecodeMode mode, Execution& execution,
                               const AfterChunk& after) const = 0;
  // Values of x + residual with at least these magnitude bits are refused: by default Inf's bits.
  [[nodiscard]] virtual uint32_t refused_magnitude(ResidualType residual) const noexcept;
  // kNonFinite, naming the first refused value.
  [[nodiscard]] Status refuse(const Input& input) const;
  // Index of the first refused value.
  [[nodiscard]] std::optional<uint64_t> find_refused(const Input& input) const;

  // "s=1.75,coder=none": the parameters of this codec that are not at their defaults.
  [[nodiscard]] virtual std::string parameter_text() const = 0;

 private:
  ResidualType residual_type_;
};

// Every codec, in the order of src/codecs/codecs.def.
[[nodiscard]] GRADWIRE_EXPORT std::span<const CodecInfo* const> codecs() noexcept;

// Every name, in the order of src/codecs/codec_names.def.
[[nodiscard]] GRADWIRE_EXPORT std::span<const CodecName> codec_names() noexcept;

// "small:ef=off" -> "3lc:s=1.00,coder=rice,ef=off"; a text without a CodecName as it is.
[[nodiscard]] GRADWIRE_EXPORT std::string spell_out_codec(std::string_view text);

// The keys ef and residual, which every codec takes but the lossless ones.
[[nodiscard]] GRADWIRE_EXPORT std::span<const CodecParameter> common_parameters(
    const CodecInfo& info) noexcept;

}  // namespace gradwire
