#include "exchange/steps/pulled_sums.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "base/return_if_error.h"
#include "codecs/qsgd/qsgd.h"
#include "codecs/registry.h"
#include "codecs/terngrad/terngrad.h"
#include "codecs/trit_sums.h"
#include "stages/levels/levels.h"

namespace gradwire {
namespace {

// One scale for all values, however many: the largest group size that param_b can hold.
constexpr uint32_t kWholeSegment = 4294967288;

Status refuse(const std::string& exchange, const Layout& layout, const Segment& segment,
              const std::string& why) {
  return {StatusCode::kInvalidArgument,
          exchange + ": tensor '" + layout.tensors()[segment.tensor].name + "', push " +
              segment.push_codec->text() + ", pull " + segment.pull_codec->text() + ": " + why};
}

// The codec of the segment's pulls.
Result<std::shared_ptr<const Codec>> pull_codec(const std::string& exchange, const Layout& layout,
                                                const Segment& segment) {
  const auto* parameters = parameters_of<TernGradParameters>(*segment.push_codec);
  if (parameters == nullptr) return segment.pull_codec;
  GW_RETURN_IF_ERROR(check_keeps_no_residual(exchange, layout, segment));
  const std::string levels = std::to_string(layout.workers());
  if (segment.pull_codec->text() == segment.push_codec->text()) {
    const uint32_t group = parameters->group_size == 0 ? kWholeSegment : parameters->group_size;
    return Codec::parse("qsgd:levels=" + levels + ",bucket=" + std::to_string(group));
  }
  const auto* pulled = parameters_of<QsgdParameters>(*segment.pull_codec);
  if (pulled == nullptr || pulled->levels != static_cast<int32_t>(layout.workers()) ||
      !groups_fit({segment.n, parameters->group_size}, {segment.n, pulled->group_size})) {
    return refuse(exchange, layout, segment,
                  "sums of trits are pulled by the same codec or by qsgd with levels=" + levels +
                      " and groups that have one scale");
  }
  return segment.pull_codec;
}

}  // namespace

Status check_keeps_no_residual(const std::string& exchange, const Layout& layout,
                               const Segment& segment) {
  if (segment.push_codec->residual_type() == ResidualType::kNone &&
      segment.pull_codec->residual_type() == ResidualType::kNone) {
    return {};
  }
  return refuse(exchange, layout, segment,
                "no residual is kept, as the mean of the draws is the gradient; add ef=off");
}

bool pushes_trits(const Segment& segment) {
  return parameters_of<TernGradParameters>(*segment.push_codec) != nullptr;
}

Result<Layout> with_pulled_sums(const std::string& exchange, const Layout& layout) {
  if (layout.workers() > kLargestLevel) {
    return Status(StatusCode::kInvalidArgument,
                  exchange + ": at most " + std::to_string(kLargestLevel) +
                      " ranks, as qsgd has so many levels for their sums; the layout has " +
                      std::to_string(layout.workers()));
  }
  std::vector<std::shared_ptr<const Codec>> codecs;
  for (const Segment& segment : layout.segments()) {
    GW_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> codec, pull_codec(exchange, layout, segment));
    codecs.push_back(codec);
  }
  return layout.with_pull_codecs(codecs);
}

}  // namespace gradwire
