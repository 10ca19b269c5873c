#include "exchange/steps/residual_watch.h"

#include <algorithm>
#include <cmath>

namespace gradwire {
namespace {

// A sum of squares fades by this from one examination to the next, so that its root halves in 1024
// steps. Gradients may become much smaller within a training, faster than some codecs send what
// they owe; their residual is no sign of divergence.
const double kFade = std::exp2(-2.0 * ResidualWatch::kInterval / 1024);

}  // namespace

void ResidualWatch::examine(const Shards& shards, std::span<const ShardCodec::ResidualNorms> norms,
                            uint64_t step) {
  inputs_.resize(shards.layout->segments().size());
  for (const ShardCodec::ResidualNorms& found : norms) {
    if (!std::isfinite(found.input)) continue;  // such a step is skipped
    double& input = inputs_[found.segment];
    input = std::max(found.input, input * kFade);
    const ResidualType type = shards.own_codec(found.segment)->residual_type();
    const double limit = most_inputs(type);
    if (input == 0 || !(found.residual > limit * limit * input)) continue;
    const Segment& segment = shards.segment(found.segment);
    const std::string& tensor = shards.layout->tensors()[segment.tensor].name;
    const Direction direction = shards.direction(segment.owner);
    const bool known = std::ranges::any_of(outgrown_, [&](const OutgrownResidual& one) {
      return one.tensor == tensor && one.direction == direction;
    });
    if (known) continue;
    outgrown_.push_back({.direction = direction,
                         .tensor = tensor,
                         .step = step,
                         .factor = std::sqrt(found.residual / input),
                         .type = type});
  }
}

}  // namespace gradwire
