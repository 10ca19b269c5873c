// The residuals of a PacketExchange, in and out.

#include <algorithm>
#include <cmath>

#include "exchange/packet_exchange.h"

namespace gradwire {

void PacketExchange::scale_residuals(float factor) {
  for (Residual& residual : residuals_) residual.scale(factor);
}

std::vector<ResidualPiece> PacketExchange::export_residuals() const {
  std::vector<ResidualPiece> pieces;
  for (size_t i = 0; i < residuals_.size(); ++i) {
    const Segment& segment = layout_->segments()[i];
    if (residuals_[i].type() == ResidualType::kNone) continue;
    pieces.push_back({.role = owns(segment.owner) ? RuleScope::kPull : RuleScope::kPush,
                      .tensor = layout_->tensors()[segment.tensor].name,
                      .offset = segment.tensor_offset,
                      .values = residuals_[i].values()});
  }
  return pieces;
}

Status PacketExchange::import_residual(const ResidualPiece& piece) {
  const std::vector<TensorInfo>& tensors = layout_->tensors();
  const auto tensor = std::find_if(tensors.begin(), tensors.end(), [&](const TensorInfo& info) {
    return info.name == piece.tensor;
  });
  const uint64_t end = piece.offset + piece.values.size();
  if (tensor == tensors.end() || piece.offset > tensor->numel() || end > tensor->numel()) {
    return {StatusCode::kInvalidArgument,
            "residual of tensor '" + piece.tensor + "', values " + std::to_string(piece.offset) +
                ".." + std::to_string(end) + ": the layout has no such place"};
  }
  if (!std::ranges::all_of(piece.values, [](float value) { return std::isfinite(value); })) {
    return {StatusCode::kNonFinite, "residual of tensor '" + piece.tensor + "': not finite"};
  }
  const auto index = static_cast<uint32_t>(tensor - tensors.begin());
  const float world = reduction_ == Reduction::kSum ? 1.0f : static_cast<float>(layout_->workers());
  for (size_t i = 0; i < residuals_.size(); ++i) {
    const Segment& segment = layout_->segments()[i];
    if (segment.tensor != index) continue;
    const uint64_t first = std::max(segment.tensor_offset, piece.offset);
    const uint64_t last = std::min(segment.tensor_offset + segment.n, end);
    if (first >= last) continue;
    const bool pull_here = owns(segment.owner);
    Residual& residual = residuals_[i];
    if (world_size() == 1 && residual.type() != segment.pull_codec->residual_type()) {
      residual = Residual(segment.pull_codec->residual_type(), segment.n);
      keeps_residuals_ = true;
    }
    const bool pull_there = piece.role == RuleScope::kPull;
    const float factor = pull_here == pull_there ? 1.0f : pull_here ? 1.0f / world : world;
    residual.add(first - segment.tensor_offset,
                 std::span(piece.values).subspan(first - piece.offset, last - first), factor);
  }
  return {};
}

}  // namespace gradwire
