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

struct ExchangeStats {
  uint64_t steps = 0;
  uint64_t non_finite_steps = 0;
  // Packets whole, with their headers.
  uint64_t push_bytes_sent = 0;
  uint64_t push_bytes_received = 0;
  uint64_t scale_bytes_sent = 0;  // of push_bytes_sent: TernGrad's max round
  uint64_t pull_bytes_sent = 0;   // a packet as often as it is sent, passed-on ones too
  uint64_t pull_bytes_received = 0;
  uint64_t pull_bytes_encoded = 0;  // the one packet, once
  uint64_t local_bytes_sent = 0;    // inside a machine, uncompressed; in none of the others
  uint64_t values_pushed = 0;       // values that push_bytes_sent stand for
  uint64_t values_pulled = 0;       // values that pull_bytes_encoded stand for
  double encode_seconds = 0;
  double decode_seconds = 0;  // with adding and averaging
  // Norm of what the pushes of one step left unsent over the norm of their input, sampled now and
  // then; and how many samples error_norm_sum holds.
  double error_norm_sum = 0;
  uint64_t error_norm_samples = 0;
};

// A piece of residual with its place, for checkpoints.
struct ResidualPiece {
  RuleScope role;  // kPush or kPull
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

// What an owner makes of its shard's average before everyone gets it, in place: nothing where
// averages are wanted; the model's step where optimizer states are sharded. Gets the bucket, in
// which the segments of this owner hold their averages. A failure ends the exchange.
using ShardUpdate = std::function<Status(std::span<float> bucket)>;

// Two-phase all-reduce (3LC's servers, section 3, co-located with the workers):
//
//   push  every rank encodes each shard for its owner; 1 packet to each of the N - 1 others
//   pull  the owner adds the pushes to its own part in ascending order of ranks, divides by N
//         (unless the sum is wanted), encodes once, and sends everyone the same bytes, which it
//         decodes itself as well
//
// Bytes sent by a rank for n values at b bits: (N - 1) / N * n * b / 8 each way, plus headers; 2
// messages on the longest way. The owner's own part is added exactly: it costs no traffic, so it
// isn't quantized. Every value is quantized twice, whatever N; error feedback on both ways keeps
// the error of the running sum bounded.
//
// With an `update`, each owner's optimizer steps its shard between the two, and the pull carries
// its result (the model delta) with the owner's residual. A step that is not finite is not updated.
//
// kInvalidArgument: rank is not below the layout's world size.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_sharded_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution, uint64_t seed = 0,
    ShardUpdate update = {}, Reduction reduction = Reduction::kAverage);

// The push of the sharded exchange alone: at the end the segments that this rank owns hold their
// average or sum, and the others unspecified values. (N - 1) / N * n * b / 8 bytes sent, 1 message
// on the longest way; each value that isn't the owner's is quantized once.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution, uint64_t seed = 0,
    Reduction reduction = Reduction::kAverage);

// Its pull alone: everyone gets what the owners' segments hold, encoded once; the owners, too, end
// with what the others decode. (N - 1) times its own part's n * b / 8 bytes sent, 1 message.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_allgather_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution, uint64_t seed = 0);

// Ring all-reduce (INCEPTIONN, algorithm 1), neighbours alone talk:
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
// kInvalidArgument: rank is not below the layout's world size.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_ring_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution, uint64_t seed = 0,
    Reduction reduction = Reduction::kAverage);

// TernGrad's exchange (sections 3 and 4: scaler sharing, parameter localization): gradients travel
// both ways, never parameters, and sums of trits are never decoded on their way:
//
//   max   every rank sends every other the largest clipped magnitude of each segment, or of each
//         bucket where terngrad has some: the largest of all ranks is everyone's scale
//   push  every rank draws its trits with these scales and sends each shard to its owner
//   pull  the owner draws its own part too, adds trits as integers, and sends everyone the sums as
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
// The layout's pushes: terngrad without error feedback, or for segments that go as in the sharded
// exchange (raw), any codec that keeps no residual. Pulls of terngrad: the same, which stands for
// qsgd of equal bits, or qsgd with levels=N and buckets that fit, for another coder. A gradient
// that is not finite is told in the max round, and the result is NaN everywhere, on raw layouts
// too.
//
// kInvalidArgument: rank out of range, more than 127 ranks, other codecs.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_terngrad_exchange(
    const std::shared_ptr<const Layout>& layout, uint32_t rank, Execution execution,
    uint64_t seed = 0);

// The exchanges that need nothing but a layout.
enum class ExchangeKind : uint8_t { kSharded, kRing, kTernGrad };

// "sharded", "ring", "terngrad"
[[nodiscard]] GRADWIRE_EXPORT std::string_view exchange_name(ExchangeKind kind) noexcept;
// kInvalidArgument listing the names.
GRADWIRE_EXPORT Result<ExchangeKind> parse_exchange(std::string_view name);
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_exchange(
    ExchangeKind kind, std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    uint64_t seed = 0, Reduction reduction = Reduction::kAverage);

// Hierarchical all-reduce (INCEPTIONN, figure 1): what is near is not worth compressing. The lowest
// rank of each machine speaks for it:
//
//   parts    the other ranks send their buckets to the speaker as they are; it adds them in
//            ascending order of ranks
//   between  the speakers average over the machines, each sum divided by the mean number of ranks
//            a machine; or they add, undivided
//   result   the speaker sends its bucket as it is
//
// `layout` is that of the speakers: its world size is the number of machines. Bytes on the network
// and error are those of the inner exchange with N = machines; inside a machine of k ranks, 4 n
// bytes to and from each of k - 1. Messages on the longest way: 2 more than the inner exchange's.
// A step that is not finite is told with the speaker's rank.
//
// machine_of_rank: the machine of every rank, any numbers. `between_execution` is the speaker's for
// encoding. kInvalidArgument: rank out of range, another number of machines than the layout's.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_hierarchical_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank,
    const std::vector<uint32_t>& machine_of_rank, ExchangeKind between, Execution execution,
    Execution between_execution, uint64_t seed = 0, Reduction reduction = Reduction::kAverage);

}  // namespace gradwire
