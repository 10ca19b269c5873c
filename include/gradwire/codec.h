#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "gradwire/execution.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

// Types that values come in. float32 holds the others exactly.
enum class Dtype : uint8_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

[[nodiscard]] constexpr uint64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

// No tensor segment has more values (spec/format.md, limits).
inline constexpr uint64_t kMaxNumel = uint64_t{1} << 40;

enum class ResidualType : uint8_t { kNone, kFloat32, kBfloat16 };

// The values to encode, read as float32.
class InputView {
 public:
  // Converts from whatever is a span of floats.
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

// The residual of one segment, as long as the input, or nothing. Encoding adds it to the input and
// leaves in it what the decoder will not see.
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

// What stochastic codecs draw their random numbers from: key (seed, stream), counter (step, index
// of the value). Deterministic codecs ignore it.
struct DrawContext {
  uint64_t seed = 0;
  uint64_t stream = 0;
  uint64_t step = 0;
};

// What a decoder needs to know beside the payload; stands in the frame header.
struct WireCodec {
  uint8_t id = 0;
  uint16_t param_a = 0;
  uint32_t param_b = 0;

  friend bool operator==(const WireCodec&, const WireCodec&) = default;
};

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
  std::string_view source;  // paper and section
  bool error_feedback;      // the default of `ef`
  bool lossless;            // nothing is ever left over, so that ef and residual are no keys
  std::span<const CodecParameter> parameters;
};

enum class DecodeMode : uint8_t { kStore, kAdd };

// A named chain of stages with its parameters. Immutable; one object serves all threads.
class GRADWIRE_EXPORT Codec {
 public:
  // Reads "3lc", "3lc:s=1.75,coder=zre". Keys that every codec has: ef=on|off (error feedback),
  // residual=f32|bf16 (what keeps it). kUnknownCodec and kBadParameter list what is valid.
  static Result<std::shared_ptr<const Codec>> parse(std::string_view text);

  // The codec of a frame that was received, which was made from values of `dtype`. kUnknownCodec,
  // kReservedBits.
  static Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire,
                                                        Dtype dtype = Dtype::kFloat32);

  virtual ~Codec() = default;

  [[nodiscard]] virtual const CodecInfo& info() const noexcept = 0;
  // Canonical text: parse(text()) gives an equal codec. Defaults are left out, except 3lc's s,
  // topk's ratio and stc's density.
  [[nodiscard]] std::string text() const;
  // What a decoder can tell of it: text() without error feedback, which is the sender's affair.
  [[nodiscard]] std::string wire_text() const;
  [[nodiscard]] virtual WireCodec wire() const noexcept = 0;

  // off: encode gets no residual. Otherwise what a compressor keeps.
  [[nodiscard]] ResidualType residual_type() const noexcept { return residual_type_; }

  // Upper bound of encode's result for n values, n <= kMaxNumel; never exceeded.
  [[nodiscard]] virtual uint64_t max_payload_size(uint64_t n) const noexcept = 0;

  // kCorruptPayload where no payload of `size` bytes can hold n values, so that a decoder refuses
  // before it takes memory for them.
  virtual Status check_size(uint64_t n, uint64_t size) const = 0;

  // Encodes x plus residual into payload and returns the payload's size in bytes. The residual's
  // size is x.size() or its type kNone.
  //   kBufferTooSmall: payload is smaller than max_payload_size(x.size()).
  //   kNonFinite: x + residual holds NaN or Inf, the message names the first such element.
  // On failure the residual is as it was.
  virtual Result<uint64_t> encode(const InputView& x, const ResidualView& residual,
                                  const DrawContext& draw, std::span<std::byte> payload,
                                  Execution& execution) const = 0;

  // Decodes a payload that came with this codec's wire parameters into (kStore) or onto (kAdd) out,
  // whose size is the number of values. Any bytes are safe. On kCorruptPayload `out` holds
  // unspecified values.
  virtual Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                        Execution& execution) const = 0;

 protected:
  explicit Codec(ResidualType residual_type) : residual_type_(residual_type) {}
  // "s=1.75,coder=none": the parameters of this codec that are not at their defaults.
  [[nodiscard]] virtual std::string parameter_text() const = 0;

 private:
  ResidualType residual_type_;
};

// Every codec, in the order of src/codecs/codecs.def.
[[nodiscard]] GRADWIRE_EXPORT std::span<const CodecInfo* const> codecs() noexcept;

// Keys that every codec takes but the lossless ones: ef, residual.
[[nodiscard]] GRADWIRE_EXPORT std::span<const CodecParameter> common_parameters(
    const CodecInfo& info) noexcept;

}  // namespace gradwire
