#include "exchange/shards/shards.h"

#include <algorithm>
#include <utility>

#include "base/checksum.h"

namespace gradwire {
namespace {

// The draw stream of a segment on a rank. It depends on the tensor's name, so no other tensor has
// the same draw stream, whichever bucket the tensor lies in.
uint64_t draw_stream(const Layout& layout, uint32_t rank, const Segment& segment) {
  const uint64_t place[] = {rank, segment.tensor_offset};
  return digest64(std::as_bytes(std::span(place)),
                  std::as_bytes(std::span(layout.tensors()[segment.tensor].name)));
}

}  // namespace

Shards::Shards(std::shared_ptr<const Layout> of_layout, uint32_t of_rank, uint64_t draw_seed)
    : layout(std::move(of_layout)), rank(of_rank), seed(draw_seed), segments(layout->shards()) {
  for (uint32_t i = 0; i < layout->segments().size(); ++i) {
    segments[segment(i).owner].push_back(i);
    draw_streams.push_back(draw_stream(*layout, rank, segment(i)));
    compressed.push_back(own_codec(i)->text() != layout->raw_codec());
  }
}

ResidualType Shards::residual_type(uint32_t i) const {
  if (count() == 1 || !is_encoded(segment(i).owner)) return ResidualType::kNone;
  return own_codec(i)->residual_type();
}

bool any_residuals(const Layout& layout) {
  return layout.world_size() > 1 && std::ranges::any_of(layout.segments(), [](const auto& segment) {
           return segment.push_codec->residual_type() != ResidualType::kNone ||
                  segment.pull_codec->residual_type() != ResidualType::kNone;
         });
}

}  // namespace gradwire
