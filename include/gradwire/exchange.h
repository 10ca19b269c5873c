#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/execution.h"
#include "gradwire/export.h"
#include "gradwire/layout.h"
#include "gradwire/status.h"

namespace gradwire {

struct OutgoingMessage {
  uint32_t peer;                     // rank that gets it
  std::span<const std::byte> bytes;  // valid until the next start
  // Where it is set, the bytes are valid as long as it is held: for those who take long.
  std::shared_ptr<const void> keep = {};
};

// A gradient that was not finite: the step is skipped by every rank alike.
struct NonFiniteInput {
  uint32_t rank;
  std::string tensor;
  uint64_t element;  // index in the tensor
};

// What exchange_counters.def says.
struct ExchangeStats {
#define GW_EXCHANGE_COUNTER(type, name, python_name) type name = 0;
#include "gradwire/exchange_counters.def"
#undef GW_EXCHANGE_COUNTER
};

// A piece of residual with its place, for checkpoints.
struct ResidualPiece {
  Direction direction;
  std::string tensor;
  uint64_t offset;  // first value in the tensor
  std::vector<float> values;
};

// What a bucket holds at the end: the mean over all ranks, or the sum.
enum class Reduction : uint8_t { kAverage, kSum };

// kPeerMismatch naming the first line in which two ranks' descriptions differ, and both versions.
GRADWIRE_EXPORT Status compare_descriptions(uint32_t rank, std::string_view description,
                                            uint32_t peer, std::string_view peer_description);

// A collective algorithm without input or output, which averages a bucket over all ranks. An engine
// moves its messages:
//
//   start(bucket, step); then, until done():
//     send what take_outgoing() hands out; receive one message from each rank in awaiting(),
//     in any order, and hand it to receive(). Where awaits_any(), one message from any rank.
//
// After a failed start or receive the exchange can't go on: no rank may use this step's bucket.
class GRADWIRE_EXPORT Exchange {
 public:
  virtual ~Exchange() = default;

  // What must be equal on all ranks. Compared with check_peer before the first step.
  [[nodiscard]] virtual std::string describe() const = 0;
  // kPeerMismatch naming the first line in which the peer's description differs, and both versions.
  [[nodiscard]] Status check_peer(uint32_t peer, std::string_view description) const;

  // Begins a step on a bucket of layout.numel() values, which the exchange works in until done.
  // Messages of the step before that were not taken are gone.
  virtual Status start(std::span<float> bucket, uint64_t step) = 0;
  // Messages that are ready and were not yet handed out.
  virtual std::vector<OutgoingMessage> take_outgoing() = 0;
  // Ranks from which a message is due before the algorithm can go on, ascending.
  [[nodiscard]] virtual std::vector<uint32_t> awaiting() const = 0;
  // Whether the algorithm may go on without some of these ranks, so that an engine must not wait
  // for a certain one, and takes what comes from any.
  [[nodiscard]] virtual bool awaits_any() const { return false; }
  // Ranks whose messages are taken as they come, awaited or not, and also when done; from others,
  // none may be handed over that isn't awaited. Empty but for exchanges whose ranks go on each at
  // their own pace.
  [[nodiscard]] virtual std::vector<uint32_t> listening() const { return {}; }
  // A message came. It is used or copied before this returns.
  virtual Status receive(uint32_t peer, std::span<const std::byte> message) = 0;
  // The bucket holds the result, the same bits on every rank.
  [[nodiscard]] virtual bool done() const = 0;
  // Why this step's result is NaN; nothing where it is not.
  [[nodiscard]] virtual const std::optional<NonFiniteInput>& non_finite() const = 0;

  // Whether any segment has a residual on any rank. Only then is a step that is not finite marked;
  // TernGrad's exchange always does.
  [[nodiscard]] virtual bool keeps_residuals() const noexcept = 0;
  // For a step whose result nobody applied: what the last step sent goes back into the residuals of
  // those who sent it, or, where an owner had averaged it, into the owner's. Once a step, when
  // done.
  virtual void retract() = 0;
  // For inputs whose unit changed by `factor` (a gradient scaler's new scale over its old one).
  virtual void scale_residuals(float factor) = 0;

  [[nodiscard]] virtual std::vector<ResidualPiece> export_residuals() const = 0;
  // Adds a piece to the residuals. Where this layout gives its values another role (the owner
  // changed), they are carried over at the weight that keeps mean(push residuals) + pull residual:
  // a push residual counts 1/N in the average (whole in a sum), the owner's pull residual whole. A
  // lone rank pays what it took over with its next step. Values whose segment keeps no residual are
  // dropped. kInvalidArgument: no such tensor or range. kNonFinite: a value is NaN or Inf.
  virtual Status import_residual(const ResidualPiece& piece) = 0;

  [[nodiscard]] virtual const ExchangeStats& stats() const noexcept = 0;
  [[nodiscard]] virtual const Layout& layout() const noexcept = 0;

 protected:
  [[nodiscard]] virtual uint32_t rank() const = 0;
};

// What an owner makes of its shard's average before all ranks get it, in place: nothing where
// averages are wanted; the model's step where optimizer states are sharded. Gets the bucket, in
// which the segments of this owner hold their averages. A failure ends the exchange.
using ShardUpdate = std::function<Status(std::span<float> bucket)>;

struct ExchangeOptions {
  uint64_t seed = 0;  // of the draws
  Reduction reduction = Reduction::kAverage;
  ShardUpdate update = {};  // sharded alone
  // Hierarchical alone: the machine of every rank, any numbers. Empty: each machine holds as many
  // ranks as the parameter `ranks` says, one after the other.
  std::vector<uint32_t> machine_of_rank = {};
};

// The exchange of one rank, by its text ("ring", "hierarchical:between=ring,ranks=4"): one of those
// below. kInvalidArgument: an unknown exchange, with a list of what is valid; a rank that is not
// below the layout's world size; an option that the exchange does not take.
//
// sharded: a two-phase all-reduce (3LC's servers, section 3, co-located with the workers).
//
//   push  every rank encodes each shard for its owner; 1 packet to each of the N - 1 others
//   pull  the owner adds the pushes to its own part in ascending order of ranks, divides by N
//         (unless the sum is wanted), encodes once, and sends all others the same bytes, which it
//         decodes itself as well
//
// Bytes sent by a rank for n values at b bits: (N - 1) / N * n * b / 8 each way, plus headers; 2
// messages on the longest way. The owner's own part is added exactly: it costs no traffic, so it
// is not quantized. Every value is quantized twice, whatever N; error feedback on both ways keeps
// the error of the running sum bounded.
//
// With an `update`, each owner's optimizer steps its shard between the two, and the pull carries
// its result (the model delta) with the owner's residual. A step that is not finite is not updated.
//
// ring: a ring all-reduce (INCEPTIONN, algorithm 1), in which only neighbours talk.
//
//   reduce     N - 1 hops: shard k starts at rank k + 1 and comes to rank k; each rank on the way
//              decodes it, adds its own part and encodes the sum for the next one
//   propagate  rank k divides by N (unless the sum is wanted), encodes once and decodes that
//              itself; N - 1 hops pass the bytes on as they are
//
// Bytes sent by a rank for n values at b bits: (N - 1) / N * n * b / 8 in each leg, plus headers;
// 2 (N - 1) messages on the longest way. A sum is quantized N - 1 times, at growing scales: without
// error feedback the variance of the sum's error is N / 2 times that of the sharded exchange. With
// 3lc the scale grows by at least s from hop to hop, so by s^(N - 1): s > 1 is for the other
// exchanges.
//
// terngrad: TernGrad's exchange (sections 3 and 4: scaler sharing, parameter localization).
// Gradients travel both ways, never parameters, and sums of trits are never decoded on their way.
//
//   max   every rank sends every other the largest clipped magnitude of each segment, or of each
//         group where terngrad has groups: the largest of all ranks is the scale of all ranks
//   push  every rank draws its trits with these scales and sends each shard to its owner
//   pull  the owner draws its own part too, adds trits as integers, and sends all ranks the sums as
//         they are, levels from -N to N: frames of qsgd whose unit is scale / N, decoded to
//         sum * scale / N
//
// Bytes sent by a rank for n values and S scales: (N - 1) * 4 S in the max round, (N - 1) / N * n *
// 2 / 8 each push (1.6 bits with pack=trits5, less with a coder) and (N - 1) / N * n *
// ceil(log2(2 N + 1)) / 8 each pull, each with its scales, (N - 1) / N * 4 S, plus headers; 3
// messages on the longest way. Nothing but the draws errs: the mean is that of the clipped
// gradients, so no residual is kept, and its variance at a value is the mean over ranks of
// |b| (scale - |b|), over N. The sharded exchange draws its pulls again, at the full variance
// whatever N.
//
// The layout's pushes are terngrad without error feedback, or any codec that keeps no residual for
// segments that go as in the sharded exchange (raw). Pulls are terngrad with the same parameters,
// which stands for qsgd of equal bits, or, for another coder, qsgd with levels=N and groups that
// fit. Each rank marks a gradient that is not finite in the max round, and the result is NaN
// everywhere, with raw layouts too. At most 127 ranks.
//
// hierarchical: a hierarchical all-reduce (INCEPTIONN, figure 1), which compresses nothing inside a
// machine. The lowest rank of each machine speaks for it:
//
//   parts    the other ranks send their buckets to the speaker as they are; it adds them in
//            ascending order of ranks
//   between  the speakers average over the machines by another exchange, each sum divided by the
//            mean number of ranks a machine; or they add, undivided
//   result   the speaker sends its bucket as it is
//
// `layout` is that of the speakers: its world size is the number of machines. Bytes on the network
// and error are those of the inner exchange with N = machines; inside a machine of k ranks, 4 n
// bytes to and from each of k - 1. Messages on the longest way: 2 more than the inner exchange's.
// The marker of a step that is not finite names the speaker's rank.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_exchange(
    std::string_view text, std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    ExchangeOptions options = {});

// The push of the sharded exchange alone: at the end the segments that this rank owns hold their
// average or sum, and the others unspecified values. (N - 1) / N * n * b / 8 bytes sent, 1 message
// on the longest way; each value of another rank than the owner is quantized once.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    const ExchangeOptions& options = {});

// Its pull alone: all ranks get what the owners' segments hold, encoded once; the owners, too, end
// with what the others decode. (N - 1) times its own part's n * b / 8 bytes sent, 1 message.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_allgather_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    const ExchangeOptions& options = {});

}  // namespace gradwire
