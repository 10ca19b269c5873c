#include "gradwire/layout.h"

#include <fnmatch.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <unordered_set>

#include "base/return_if_error.h"
#include "gradwire/codec_choice.h"

namespace gradwire {
namespace {

// A tensor is cut only where both pieces keep this many values: each piece costs a scale, an entry
// in the packet's header, and padding in its last byte.
constexpr uint64_t kSmallestPiece = 4096;
// Cuts fall on whole blocks of the kernels (64 packed bytes).
constexpr uint64_t kCutUnit = 320;

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

// The reason why a tensor is sent raw by default; empty if it is not.
std::string raw_reason(const TensorInfo& tensor, const LayoutOptions& options) {
  for (const std::string& pattern : options.exclude) {
    if (matches(pattern, tensor.name)) return "excluded by '" + pattern + "'";
  }
  if (tensor.dims.size() < 2) return "fewer than two dimensions";
  if (tensor.numel() < options.min_numel) {
    return "fewer than min_numel=" + std::to_string(options.min_numel) + " values";
  }
  return {};
}

// The codec that was chosen for a tensor of a goal, or its first candidate.
Result<std::shared_ptr<const Codec>> find_chosen(const AutoGoal& goal, const TensorInfo& tensor,
                                                 Direction direction,
                                                 const std::vector<ChosenCodec>& chosen) {
  const auto found = std::ranges::find_if(chosen, [&](const ChosenCodec& choice) {
    return choice.direction == direction && choice.tensor == tensor.name;
  });
  if (found == chosen.end()) return goal.candidates().front();
  return Codec::parse(found->codec);
}

// Checks a codec of the options, which may be a goal if `chosen` is set.
Status check_codec(const std::string& text, const LayoutOptions& options) {
  if (options.chosen && AutoGoal::is_goal(text)) return AutoGoal::parse(text).status();
  Status status = Codec::parse(text).status();
  if (!options.chosen || status.code() != StatusCode::kUnknownCodec) return status;
  return {status.code(), status.message() + ", auto"};
}

// The codecs of a tensor's segments, and the reason if they are raw.
Result<Segment> choose_codecs(const TensorInfo& tensor, const LayoutOptions& options) {
  Segment chosen{};
  std::string push = options.codec;
  std::string pull = options.pull_codec.empty() ? options.codec : options.pull_codec;
  const std::string reason = raw_reason(tensor, options);
  if (!reason.empty() && (push != "raw" || pull != "raw")) {
    chosen.raw_reason = reason;
    push = pull = "raw";
  }
  const auto rule_for = [&](Direction direction) -> const LayoutRule* {
    const auto rule = std::ranges::find_if(options.rules, [&](const LayoutRule& candidate) {
      return candidate.direction.value_or(direction) == direction &&
             matches(candidate.pattern, tensor.name);
    });
    return rule == options.rules.end() ? nullptr : &*rule;
  };
  if (const LayoutRule* rule = rule_for(Direction::kPush)) {
    push = rule->codec;
    chosen.raw_reason = push == "raw" ? "rule '" + rule->pattern + "'" : "";
  }
  if (const LayoutRule* rule = rule_for(Direction::kPull)) pull = rule->codec;
  const auto parse = [&](const std::string& codec, Direction direction,
                         std::string& goal_text) -> Result<std::shared_ptr<const Codec>> {
    if (!options.chosen || !AutoGoal::is_goal(codec)) {
      return Codec::parse(codec == "raw" ? options.raw_codec : codec);
    }
    GW_ASSIGN_OR_RETURN(const AutoGoal goal, AutoGoal::parse(codec));
    goal_text = goal.text();
    return find_chosen(goal, tensor, direction, *options.chosen);
  };
  GW_ASSIGN_OR_RETURN(chosen.push_codec, parse(push, Direction::kPush, chosen.push_goal));
  GW_ASSIGN_OR_RETURN(chosen.pull_codec, parse(pull, Direction::kPull, chosen.pull_goal));
  return chosen;
}

std::vector<std::string> unmatched_patterns(const std::vector<TensorInfo>& tensors,
                                            const LayoutOptions& options) {
  std::vector<std::string> patterns = options.exclude;
  for (const LayoutRule& rule : options.rules) patterns.push_back(rule.pattern);
  std::erase_if(patterns, [&](const std::string& pattern) {
    return std::ranges::any_of(
        tensors, [&](const TensorInfo& tensor) { return matches(pattern, tensor.name); });
  });
  return patterns;
}

// Returns the place in [0, numel], at or near `wanted`, where the next rank's shard begins: inside
// the tensor if both pieces are large enough, otherwise at the nearer end of the tensor.
uint64_t find_cut(const std::vector<TensorInfo>& tensors, uint64_t wanted) {
  uint64_t begin = 0;
  for (const TensorInfo& tensor : tensors) {
    const uint64_t end = begin + tensor.numel();
    if (wanted >= end) {
      begin = end;
      continue;
    }
    const uint64_t cut = begin + (wanted - begin) / kCutUnit * kCutUnit;
    if (cut - begin >= kSmallestPiece && end - cut >= kSmallestPiece) return cut;
    return wanted - begin < end - wanted ? begin : end;
  }
  return begin;
}

// The place of a segment, and its owner.
struct Piece {
  uint32_t tensor;
  uint64_t tensor_offset;
  uint64_t bucket_offset;
  uint64_t n;
  uint32_t owner;
};

std::vector<Piece> cut_evenly(const std::vector<TensorInfo>& tensors, uint64_t numel,
                              uint32_t world_size) {
  std::vector<uint64_t> cuts;  // ends of the shards
  for (uint64_t rank = 1; rank <= world_size; ++rank) {
    const uint64_t wanted = numel / world_size * rank + numel % world_size * rank / world_size;
    cuts.push_back(rank == world_size ? numel : find_cut(tensors, wanted));
  }
  std::vector<Piece> pieces;
  uint64_t position = 0;
  uint32_t owner = 0;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    const uint64_t begin = position;
    const uint64_t end = begin + tensors[t].numel();
    while (position < end) {
      while (cuts[owner] <= position) ++owner;
      const uint64_t stop = std::min(end, cuts[owner]);
      pieces.push_back({t, position - begin, position, stop - position, owner});
      position = stop;
    }
  }
  return pieces;
}

std::vector<Piece> cut_rows(const std::vector<TensorInfo>& tensors, uint32_t world_size) {
  std::vector<Piece> pieces;
  uint64_t position = 0;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      const uint64_t rows = tensors[t].dims[0];
      if (tensors[t].numel() == 0) continue;
      const uint64_t row = tensors[t].numel() / rows;
      const uint64_t most = (rows + world_size - 1) / world_size;
      const uint64_t first = std::min(rows, rank * most);
      const uint64_t n = std::min(rows - first, most) * row;
      if (n > 0) pieces.push_back({t, first * row, position, n, rank});
      position += most * row;
    }
  }
  return pieces;
}

// Every tensor is whole, and of its owner.
std::vector<Piece> keep_whole(const std::vector<TensorInfo>& tensors,
                              const std::vector<uint32_t>& owners) {
  std::vector<Piece> pieces;
  uint64_t position = 0;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    const uint64_t n = tensors[t].numel();
    if (n > 0) pieces.push_back({t, 0, position, n, owners[t]});
    position += n;
  }
  return pieces;
}

// The server of each tensor: in order of size, the largest first, each tensor goes to the server
// that has the fewest values so far.
std::vector<uint32_t> assign_whole(const std::vector<TensorInfo>& tensors, uint32_t first_server,
                                   uint32_t servers) {
  std::vector<size_t> by_size(tensors.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::ranges::stable_sort(by_size, std::greater(), [&](size_t t) { return tensors[t].numel(); });
  std::vector<uint64_t> shares(servers);
  std::vector<uint32_t> owners(tensors.size());
  for (size_t t : by_size) {
    const auto least = std::ranges::min_element(shares);
    *least += tensors[t].numel();
    owners[t] = first_server + static_cast<uint32_t>(least - shares.begin());
  }
  return owners;
}

std::vector<Piece> cut_bucket(const std::vector<TensorInfo>& tensors, uint64_t numel,
                              uint32_t world_size, const LayoutOptions& options) {
  if (options.owner) {
    return keep_whole(tensors, std::vector<uint32_t>(tensors.size(), *options.owner));
  }
  if (options.servers > 0) {
    const uint32_t workers = world_size - options.servers;
    return keep_whole(tensors, assign_whole(tensors, workers, options.servers));
  }
  if (options.cut == Cut::kRows) return cut_rows(tensors, world_size);
  return cut_evenly(tensors, numel, world_size);
}

// With the padding.
Result<uint64_t> numel_in_bucket(const TensorInfo& tensor, uint32_t world_size, Cut cut) {
  std::vector<uint64_t> dims = tensor.dims;
  if (cut == Cut::kRows) {
    if (dims.empty()) {
      return Status(StatusCode::kInvalidArgument,
                    "tensor '" + tensor.name + "' has no dimension, so it has no rows");
    }
    dims[0] = dims[0] / world_size + (dims[0] % world_size != 0);
    dims.push_back(world_size);
  }
  uint64_t numel = 1;
  for (uint64_t dim : dims) {
    if (__builtin_mul_overflow(numel, dim, &numel)) numel = kMaxNumel + 1;
  }
  return numel;
}

std::string dims_text(const TensorInfo& tensor) {
  std::string text;
  for (uint64_t dim : tensor.dims) text += (text.empty() ? "" : "x") + std::to_string(dim);
  return "[" + text + "]";
}

std::string codec_text(const Codec& codec, const std::string& goal) {
  return codec.text() + (goal.empty() ? "" : " (" + goal + ")");
}

}  // namespace

uint64_t TensorInfo::numel() const noexcept {
  uint64_t n = 1;
  for (uint64_t dim : dims) n *= dim;
  return n;
}

Result<Layout> Layout::create(std::vector<TensorInfo> tensors, uint32_t world_size,
                              const LayoutOptions& options) {
  if (world_size == 0 || world_size > kMaxWorldSize) {
    return Status(StatusCode::kInvalidArgument, "world size must be 1 to " +
                                                    std::to_string(kMaxWorldSize) + ", got " +
                                                    std::to_string(world_size));
  }
  if (options.owner.value_or(0) >= world_size) {
    return Status(StatusCode::kInvalidArgument, "owner: rank " + std::to_string(*options.owner) +
                                                    " is not below the world size " +
                                                    std::to_string(world_size));
  }
  if (options.servers >= world_size) {
    return Status(StatusCode::kInvalidArgument,
                  std::to_string(options.servers) + " servers in a world of " +
                      std::to_string(world_size) + " ranks leave no worker");
  }
  if (options.servers > 0 && options.owner && *options.owner < world_size - options.servers) {
    return Status(StatusCode::kInvalidArgument,
                  "owner: rank " + std::to_string(*options.owner) + " is a worker; ranks " +
                      std::to_string(world_size - options.servers) + " to " +
                      std::to_string(world_size - 1) + " are servers");
  }
  if (options.cut != Cut::kEvenly && (options.servers > 0 || options.owner)) {
    return Status(StatusCode::kInvalidArgument,
                  "servers and an owner take whole tensors, which are not cut into rows");
  }
  // An unused codec must be valid, too: otherwise a typo would be found only with other models.
  for (const std::string& codec : {options.codec, options.pull_codec, options.raw_codec}) {
    if (!codec.empty()) GW_RETURN_IF_ERROR(check_codec(codec, options));
  }
  for (const LayoutRule& rule : options.rules) {
    GW_RETURN_IF_ERROR(check_codec(rule.codec, options));
  }

  // Residuals find their tensors by name.
  std::unordered_set<std::string_view> names;
  for (const TensorInfo& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return Status(StatusCode::kInvalidArgument,
                    "two tensors have the name '" + tensor.name + "'; give each its own");
    }
  }

  Layout layout;
  layout.world_size_ = world_size;
  layout.raw_codec_ = options.raw_codec;
  layout.servers_ = options.servers;
  layout.owner_ = options.owner;
  layout.cut_ = options.cut;
  layout.shards_ = world_size;
  for (const TensorInfo& tensor : tensors) {
    GW_ASSIGN_OR_RETURN(const uint64_t numel, numel_in_bucket(tensor, world_size, options.cut));
    if (numel > kMaxNumel - layout.numel_) {
      return Status(StatusCode::kLimitExceeded,
                    "tensor '" + tensor.name + "' takes the bucket over the limit of 2^40 values");
    }
    layout.numel_ += numel;
  }
  std::vector<Segment> codecs;  // of each tensor
  for (const TensorInfo& tensor : tensors) {
    GW_ASSIGN_OR_RETURN(Segment chosen, choose_codecs(tensor, options));
    codecs.push_back(std::move(chosen));
  }
  for (const Piece& piece : cut_bucket(tensors, layout.numel_, world_size, options)) {
    Segment& segment = layout.segments_.emplace_back(codecs[piece.tensor]);
    segment.tensor = piece.tensor;
    segment.tensor_offset = piece.tensor_offset;
    segment.bucket_offset = piece.bucket_offset;
    segment.n = piece.n;
    segment.owner = piece.owner;
  }
  layout.unmatched_ = unmatched_patterns(tensors, options);
  layout.tensors_ = std::move(tensors);
  return layout;
}

Layout Layout::with_pull_codecs(const std::vector<std::shared_ptr<const Codec>>& codecs) const {
  Layout changed = *this;
  for (size_t i = 0; i < codecs.size(); ++i) changed.segments_[i].pull_codec = codecs[i];
  return changed;
}

Layout Layout::without_owners() const {
  Layout changed = *this;
  changed.shards_ = world_size_ + 1;
  changed.segments_.clear();
  for (Segment segment : segments_) {
    if (segment.tensor_offset > 0) continue;
    segment.n = tensors_[segment.tensor].numel();
    segment.owner = world_size_;
    changed.segments_.push_back(std::move(segment));
  }
  return changed;
}

std::string Layout::describe() const {
  std::string text = "format 1\nworld size " + std::to_string(world_size_) + "\nvalues " +
                     std::to_string(numel_) + "\ntensors " + std::to_string(tensors_.size()) + "\n";
  // Stated even if no tensor is raw, so that ranks whose gradients differ in type find out.
  if (raw_codec_ != "raw") text += "raw is " + raw_codec_ + "\n";
  if (cut_ == Cut::kRows) text += "cut into rows\n";
  if (servers_ > 0) text += "servers " + std::to_string(servers_) + "\n";
  for (const Segment& segment : segments_) {
    const TensorInfo& tensor = tensors_[segment.tensor];
    text += "tensor " + tensor.name + " " + dims_text(tensor) + " values " +
            std::to_string(segment.tensor_offset) + ".." +
            std::to_string(segment.tensor_offset + segment.n) + " owner " +
            std::to_string(segment.owner) + " push " +
            codec_text(*segment.push_codec, segment.push_goal) + " pull " +
            codec_text(*segment.pull_codec, segment.pull_goal) + "\n";
  }
  return text;
}

}  // namespace gradwire
