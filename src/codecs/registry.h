#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/private_export.h"
#include "base/return_if_error.h"
#include "codecs/parameters.h"
#include "gradwire/codec.h"

namespace gradwire {

// The entry of one codec. Codecs are listed in codecs.def, not self-registered: a static library
// would drop a registration that nobody refers to.
struct CodecEntry {
  const CodecInfo* info;
  // `given` keeps the error of a wrong parameter.
  Result<std::shared_ptr<const Codec>> (*create)(Parameters& given, ResidualType residual_type);
  Result<std::shared_ptr<const Codec>> (*from_wire)(const WireCodec& wire, Dtype dtype);
};

// The parameters of a codec, for code that needs them: kernels of a GPU, TernGrad's exchange.
template <typename P>
class WithParameters {
 public:
  explicit WithParameters(P parameters) : parameters_(parameters) {}
  [[nodiscard]] const P& parameters() const { return parameters_; }

 protected:
  ~WithParameters() = default;

 private:
  P parameters_;
};

// The common part of every codec C with parameters P.
template <typename C, typename P, typename Base>
class CodecOf : public Base, public WithParameters<P> {
 public:
  CodecOf(P parameters, ResidualType residual_type)
      : Base(residual_type), WithParameters<P>(parameters) {}
  const CodecInfo& info() const noexcept override { return C::kInfo; }

  // Why error feedback would let the residual grow without bound, and what to take instead; empty
  // if it does not. A codec whose error can be as large as its input hides this function.
  static std::string why_no_feedback(const P&) { return {}; }
};

// For why_no_feedback of codecs that draw -1, 0 or 1 for each value.
inline constexpr std::string_view kNoFeedbackForDrawnTrits =
    "trits that are drawn err by up to the largest value, so what error feedback keeps would grow "
    "without bound; leave ef out, or take 3lc, which rounds to the same trits";

// nullptr if the codec's parameters are of another type.
template <typename P>
[[nodiscard]] const P* parameters_of(const Codec& codec) {
  const auto* with = dynamic_cast<const WithParameters<P>*>(&codec);
  return with == nullptr ? nullptr : &with->parameters();
}

// The entry of the codec C. It has
//   static constexpr CodecInfo kInfo;
//   static P parse(Parameters& given);                             from its text
//   static Result<P> read(const WireCodec& wire, Dtype dtype);     from a header
//   C(P parameters, ResidualType residual_type).
template <typename C>
constexpr CodecEntry entry() {
  return {
      .info = &C::kInfo,
      .create = [](Parameters& given,
                   ResidualType residual_type) -> Result<std::shared_ptr<const Codec>> {
        const auto parameters = C::parse(given);
        if (residual_type != ResidualType::kNone) {
          const std::string why = C::why_no_feedback(parameters);
          if (!why.empty()) given.fail("ef=on is refused: " + why);
        }
        GW_RETURN_IF_ERROR(given.status());
        return std::shared_ptr<const Codec>(std::make_shared<C>(parameters, residual_type));
      },
      .from_wire = [](const WireCodec& wire, Dtype dtype) -> Result<std::shared_ptr<const Codec>> {
        GW_ASSIGN_OR_RETURN(const auto parameters, C::read(wire, dtype));
        // A header doesn't say whether the sender keeps a residual.
        const ResidualType residual_type =
            C::kInfo.error_feedback ? ResidualType::kFloat32 : ResidualType::kNone;
        return std::shared_ptr<const Codec>(std::make_shared<C>(parameters, residual_type));
      }};
}

namespace codec_entries {
#define GW_CODEC(symbol) extern GW_PRIVATE_EXPORT const CodecEntry symbol;
#include "codecs/codecs.def"
#undef GW_CODEC
}  // namespace codec_entries

}  // namespace gradwire
