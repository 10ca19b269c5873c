#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "exchange/shards/shards.h"
#include "gradwire/layout.h"
#include "gradwire/status.h"

namespace gradwire {

// kUnexpectedMessage: the protocol allows no such message or call at this time.
[[nodiscard]] Status unexpected(const std::string& what);

// "rank 3": how messages name a rank.
[[nodiscard]] std::string name_of(uint32_t rank);

// kInvalidArgument: rank is not below the layout's world size, or the layout leaves all to servers.
Status check_rank(const Layout& layout, uint32_t rank);

// This rank among those of an exchange, and the shards that they own.
class Ranks {
 public:
  explicit Ranks(const Shards& shards);

  [[nodiscard]] uint32_t own() const { return own_; }
  [[nodiscard]] uint32_t count() const { return static_cast<uint32_t>(everyone_.size()); }
  [[nodiscard]] std::span<const uint32_t> everyone() const { return everyone_; }
  // All but this rank.
  [[nodiscard]] std::span<const uint32_t> peers() const { return peers_; }
  [[nodiscard]] bool is_peer(uint32_t rank) const { return rank < count() && rank != own_; }
  // The ranks whose shards have packets: all, or the one that owns everything (Layout::owner).
  [[nodiscard]] std::span<const uint32_t> owners() const { return owners_; }
  [[nodiscard]] bool is_owner(uint32_t rank) const { return sole_owner_.value_or(rank) == rank; }
  // Those of all ranks, and the one of the segments that no rank owns.
  [[nodiscard]] std::span<const uint32_t> shards() const { return shards_; }

 private:
  uint32_t own_;
  std::optional<uint32_t> sole_owner_;
  std::vector<uint32_t> everyone_;
  std::vector<uint32_t> peers_;
  std::vector<uint32_t> owners_;
  std::vector<uint32_t> shards_;
};

}  // namespace gradwire
