#include "exchange/steps/non_finite.h"

namespace gradwire {

bool NonFiniteOrigins::note(const NonFiniteOrigin& origin) {
  if (first_) return false;
  first_ = {.rank = origin.rank, .tensor = "?", .element = origin.element};
  const Layout& layout = *shards_->layout;
  if (origin.segment < layout.segments().size()) {
    const Segment& segment = layout.segments()[origin.segment];
    first_->tensor = layout.tensors()[segment.tensor].name;
    first_->element += segment.tensor_offset;
  }
  return true;
}

FirstNonFinite NonFiniteOrigins::known() const {
  if (!origins_.known || !*origins_.known) return {};
  const NonFiniteInput& known = **origins_.known;
  const Layout& layout = *shards_->layout;
  const std::vector<Segment>& segments = layout.segments();
  NonFiniteOrigin origin = {.rank = known.rank,
                            .segment = static_cast<uint32_t>(segments.size()),
                            .element = known.element};
  for (uint32_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    if (layout.tensors()[segment.tensor].name != known.tensor ||
        known.element - segment.tensor_offset >= segment.n) {
      continue;
    }
    origin.segment = i;
    origin.element = known.element - segment.tensor_offset;
  }
  return origin;
}

FirstNonFinite NonFiniteOrigins::in_marker(FirstNonFinite origin) const {
  if (origin) origin->rank = outer_rank(origin->rank);
  return origin;
}

uint32_t NonFiniteOrigins::outer_rank(uint32_t rank) const {
  return origins_.outer_ranks.empty() ? rank : origins_.outer_ranks[rank];
}

uint32_t NonFiniteOrigins::leg_rank(const NonFiniteOrigin& origin) const {
  if (origins_.outer_ranks.empty()) return origin.rank;
  return origin.rank < origins_.leg_ranks.size() ? origins_.leg_ranks[origin.rank]
                                                 : shards_->count();
}

}  // namespace gradwire
