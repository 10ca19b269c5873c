#include "exchange/steps/ranks.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace gradwire {

Status unexpected(const std::string& what) { return {StatusCode::kUnexpectedMessage, what}; }

std::string name_of(uint32_t rank) { return "rank " + std::to_string(rank); }

Status check_rank(const Layout& layout, uint32_t rank) {
  if (layout.servers() > 0) {
    return {StatusCode::kInvalidArgument, "a layout with servers is for the server exchange alone"};
  }
  if (rank < layout.world_size()) return {};
  return {StatusCode::kInvalidArgument,
          name_of(rank) + " is not below the world size " + std::to_string(layout.world_size())};
}

Ranks::Ranks(const Shards& shards)
    : own_(shards.rank),
      sole_owner_(shards.layout->owner()),
      everyone_(shards.count()),
      shards_(shards.segments.size()) {
  std::iota(everyone_.begin(), everyone_.end(), 0u);
  std::iota(shards_.begin(), shards_.end(), 0u);
  std::ranges::copy_if(everyone_, std::back_inserter(peers_),
                       [&](uint32_t rank) { return rank != own_; });
  std::ranges::copy_if(everyone_, std::back_inserter(owners_),
                       [&](uint32_t rank) { return is_owner(rank); });
}

}  // namespace gradwire
