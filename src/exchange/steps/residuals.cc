#include "exchange/steps/residuals.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "base/return_if_error.h"

namespace gradwire {
namespace {

// Steps from one examination to the next.
constexpr uint64_t kInterval = 16;

// A sum of squares fades by this from one examination to the next, so that its root halves in 1024
// steps. Gradients may become much smaller within a training, faster than some codecs send what
// they owe; their residual is no sign of divergence.
const double kFade = std::exp2(-2.0 * kInterval / 1024);

}  // namespace

Residuals::Residuals(std::shared_ptr<const Shards> shards, ShardCodec& codec, Reduction reduction)
    : shards_(std::move(shards)),
      codec_(&codec),
      reduction_(reduction),
      kept_(any_residuals(*shards_->layout)),
      inputs_(shards_->layout->segments().size()) {}

Result<bool> Residuals::pay() {
  if (!kept_) return true;
  std::vector<uint32_t> all(shards_->segments.size());
  std::iota(all.begin(), all.end(), 0u);
  GW_ASSIGN_OR_RETURN(FirstNonFinite found, codec_->find_non_finite(all));
  if (found) return false;  // the step will be skipped
  for (uint32_t i = 0; i < inputs_.size(); ++i) {
    codec_->pay_residual(i);
    codec_->reset_residual(i, ResidualType::kNone);
  }
  kept_ = false;
  return true;
}

std::vector<ResidualPiece> Residuals::export_pieces() const {
  const Layout& layout = *shards_->layout;
  std::vector<ResidualPiece> pieces;
  for (uint32_t i = 0; i < layout.segments().size(); ++i) {
    const Segment& segment = shards_->segment(i);
    if (codec_->residual_type(i) == ResidualType::kNone) continue;
    pieces.push_back({.direction = shards_->direction(segment.owner),
                      .tensor = layout.tensors()[segment.tensor].name,
                      .offset = segment.tensor_offset,
                      .values = codec_->residual(i)});
  }
  return pieces;
}

Status Residuals::import_piece(const ResidualPiece& piece) {
  const Layout& layout = *shards_->layout;
  const auto tensor = std::ranges::find(layout.tensors(), piece.tensor, &TensorInfo::name);
  const uint64_t end = piece.offset + piece.values.size();
  if (tensor == layout.tensors().end() || piece.offset > tensor->numel() || end > tensor->numel()) {
    return {StatusCode::kInvalidArgument,
            "residual of tensor '" + piece.tensor + "', values " + std::to_string(piece.offset) +
                ".." + std::to_string(end) + ": the layout has no such place"};
  }
  if (!std::ranges::all_of(piece.values, [](float value) { return std::isfinite(value); })) {
    return {StatusCode::kNonFinite, "residual of tensor '" + piece.tensor + "': not finite"};
  }
  const float ranks = reduction_ == Reduction::kSum ? 1.0f : static_cast<float>(layout.workers());
  for (uint32_t i = 0; i < layout.segments().size(); ++i) {
    const Segment& segment = shards_->segment(i);
    const uint64_t first = std::max(segment.tensor_offset, piece.offset);
    const uint64_t last = std::min(segment.tensor_offset + segment.n, end);
    if (&layout.tensors()[segment.tensor] != &*tensor || first >= last) continue;
    if (shards_->count() == 1 && codec_->residual_type(i) == ResidualType::kNone) {
      const ResidualType in_pulls = segment.pull_codec->residual_type();
      const ResidualType in_pushes = segment.push_codec->residual_type();
      const ResidualType kept = in_pulls == ResidualType::kNone ? in_pushes : in_pulls;
      codec_->reset_residual(i, kept);
      kept_ |= kept != ResidualType::kNone;
    }
    const Direction here = shards_->direction(segment.owner);
    const float factor = here == piece.direction    ? 1.0f
                         : here == Direction::kPull ? 1.0f / ranks
                                                    : ranks;
    codec_->add_to_residual(i, first - segment.tensor_offset,
                            std::span(piece.values).subspan(first - piece.offset, last - first),
                            factor);
  }
  return {};
}

void Residuals::examine(uint32_t shard, uint64_t step, uint64_t steps) {
  if (steps % kInterval != 0) return;
  for (const ShardCodec::ResidualNorms& found : codec_->residual_norms({&shard, 1})) {
    examine(found, step);
  }
}

// Most residuals in float32 stay far below most_inputs (docs/results/error_feedback.md). Beyond it
// are 3lc with s near 2, topk and stc that send 0.1 %, onebit without groups, each with gradients
// that hardly change, and 3lc with a large s in a ring.
void Residuals::examine(const ShardCodec::ResidualNorms& found, uint64_t step) {
  if (!std::isfinite(found.input)) return;  // such a step is skipped
  double& input = inputs_[found.segment];
  input = std::max(found.input, input * kFade);
  const ResidualType type = shards_->own_codec(found.segment)->residual_type();
  const double limit = most_inputs(type);
  if (input == 0 || !(found.residual > limit * limit * input)) return;
  const Segment& segment = shards_->segment(found.segment);
  const std::string& tensor = shards_->layout->tensors()[segment.tensor].name;
  const Direction direction = shards_->direction(segment.owner);
  const bool known = std::ranges::any_of(outgrown_, [&](const OutgrownResidual& one) {
    return one.tensor == tensor && one.direction == direction;
  });
  if (known) return;
  outgrown_.push_back({.direction = direction,
                       .tensor = tensor,
                       .step = step,
                       .factor = std::sqrt(found.residual / input),
                       .type = type});
}

}  // namespace gradwire
