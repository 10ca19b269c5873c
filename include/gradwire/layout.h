#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/direction.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

// A job has at most so many ranks: packets name their source in 16 bits.
inline constexpr uint32_t kMaxWorldSize = 65535;

// A tensor of a bucket; tensors lie one after the other, unless LayoutOptions::cut says otherwise.
struct GRADWIRE_EXPORT TensorInfo {
  std::string name;
  std::vector<uint64_t> dims;

  [[nodiscard]] uint64_t numel() const noexcept;
};

// Gives a codec to the tensors whose names match `pattern`, as a shell matches file names.
struct LayoutRule {
  std::string pattern;
  std::string codec;
  std::optional<Direction> direction = {};  // nothing: both
};

// How a bucket is shared among ranks that each own a part of it.
enum class Cut : uint8_t {
  // Shards of about equal size, whose ends lie anywhere in a tensor.
  kEvenly,
  // Every tensor is cut along its first dimension into equal pieces, as FSDP2 shards it: of d rows,
  // rank r owns those from r * ceil(d / N) on. The bucket holds one shard after the other, and in a
  // shard one piece after the other, each padded to ceil(d / N) rows. No segment has the padding.
  kRows,
};

// The codec that was chosen for a tensor whose codec is a goal such as "auto:bits=0.5".
struct ChosenCodec {
  Direction direction;
  std::string tensor;
  std::string codec;
};

struct LayoutOptions {
  std::string codec = "3lc";
  std::string pull_codec = {};            // empty: as codec
  std::vector<LayoutRule> rules = {};     // the first match wins, before the fields below
  std::vector<std::string> exclude = {};  // name patterns that go raw
  uint64_t min_numel = 256;  // smaller tensors go raw, and so do those of fewer than 2 dimensions
  // The codec of tensors that go raw: "raw", or "bf16" or "fp16" for gradients of these types,
  // which it sends exactly in pushes.
  std::string raw_codec = "raw";
  // The number of servers. The last ranks are the servers; each tensor is whole on one of them,
  // balanced by size. The ranks before them are workers. 0: every rank owns a piece, and all pieces
  // are about equally large.
  uint32_t servers = 0;
  Cut cut = Cut::kEvenly;  // kRows: without servers and owner; every tensor has a dimension
  // If set, this rank owns everything. With `servers` it is one of them, and the exchange leaves
  // the others out: so a part of a model has an exchange of its own.
  std::optional<uint32_t> owner = {};
  // If set, codec, pull_codec and the rules may be goals (AutoGoal). Their tensors take the codecs
  // chosen here; a tensor that is not listed takes the goal's first candidate.
  std::optional<std::vector<ChosenCodec>> chosen = {};
};

// A piece of a tensor, which is encoded by itself.
struct Segment {
  uint32_t tensor;         // index in Layout::tensors
  uint64_t tensor_offset;  // first value in the tensor
  uint64_t bucket_offset;  // first value in the bucket
  uint64_t n;
  uint32_t owner;  // rank that sums it; the world size if every rank does
  std::shared_ptr<const Codec> push_codec;
  std::shared_ptr<const Codec> pull_codec;
  std::string raw_reason;      // why it goes raw instead of with the chosen codec; empty otherwise
  std::string push_goal = {};  // the goal for which push_codec was chosen; empty: none
  std::string pull_goal = {};
};

// How a bucket is cut into segments, which rank owns each, and which codecs encode it. Every rank
// computes the same layout from the same tensors, world size and options.
class GRADWIRE_EXPORT Layout {
 public:
  // kInvalidArgument (also: two tensors of one name), kUnknownCodec (also: a goal without
  // `chosen`), kBadParameter, kLimitExceeded (more than kMaxNumel values).
  static Result<Layout> create(std::vector<TensorInfo> tensors, uint32_t world_size,
                               const LayoutOptions& options);

  // The same layout with other codecs for pulls, one for each segment.
  [[nodiscard]] Layout with_pull_codecs(
      const std::vector<std::shared_ptr<const Codec>>& codecs) const;
  // The same layout for exchanges in which every rank sums all values: each tensor is whole, and no
  // rank owns it.
  [[nodiscard]] Layout without_owners() const;

  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const std::vector<Segment>& segments() const noexcept { return segments_; }
  [[nodiscard]] uint32_t world_size() const noexcept { return world_size_; }
  [[nodiscard]] uint32_t servers() const noexcept { return servers_; }
  // LayoutOptions::owner: the rank or server that owns everything; nothing: each has a share.
  [[nodiscard]] std::optional<uint32_t> owner() const noexcept { return owner_; }
  [[nodiscard]] Cut cut() const noexcept { return cut_; }
  // The number of shards. A shard holds the segments of one owner, so that the owner is its number;
  // without owners, all segments are in the last of world_size() + 1 shards.
  [[nodiscard]] uint32_t shards() const noexcept { return shards_; }
  // The number of ranks whose values are averaged.
  [[nodiscard]] uint32_t workers() const noexcept { return world_size_ - servers_; }
  // Values of the bucket, with padding.
  [[nodiscard]] uint64_t numel() const noexcept { return numel_; }
  [[nodiscard]] const std::string& raw_codec() const noexcept { return raw_codec_; }

  // The patterns of `rules` and `exclude` that match none of these tensors. If such a pattern
  // matches in no bucket, it may be mistyped.
  [[nodiscard]] const std::vector<std::string>& unmatched() const noexcept { return unmatched_; }

  // The text that peers compare: one line for each fact that must be equal on all ranks.
  [[nodiscard]] std::string describe() const;

 private:
  Layout() = default;

  std::vector<TensorInfo> tensors_;
  std::vector<Segment> segments_;
  std::vector<std::string> unmatched_;
  uint32_t world_size_ = 0;
  uint32_t servers_ = 0;
  std::optional<uint32_t> owner_;
  Cut cut_ = Cut::kEvenly;
  uint32_t shards_ = 0;
  uint64_t numel_ = 0;
  std::string raw_codec_;
};

}  // namespace gradwire
