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
  uint32_t peer;                     // the rank to which it goes
  std::span<const std::byte> bytes;  // valid until the next start
  // If it is set, the bytes are valid as long as it is held, so that a send may outlast the step.
  std::shared_ptr<const void> keep = {};
};

// What an engine does while an exchange works, so that copying, encoding and sending overlap. Each
// is called inside start and receive, in their thread; an empty function is not called.
struct StepEvents {
  // Called before the exchange touches any of the bucket's first `end` values, unless they are
  // known to have arrived. Waits for them, and returns how many of the first values have arrived.
  std::function<uint64_t(uint64_t end)> arrive = {};
  // Takes a message that is ready to be sent, in the place of take_outgoing.
  std::function<void(const OutgoingMessage& message)> send = {};
  // The values [begin, begin + n) of the bucket hold the result. Not every exchange says so.
  std::function<void(uint64_t begin, uint64_t n)> finished = {};
};

// The place of a gradient value that was not finite, or of a sum that overflowed: then `rank` is
// that which added. Every rank skips such a step.
struct NonFiniteInput {
  uint32_t rank;
  std::string tensor;
  uint64_t element;  // index in the tensor
};

// "the gradient of rank 3 is not finite at element 7 of w". `values`: what the exchange averages.
[[nodiscard]] GRADWIRE_EXPORT std::string describe(const NonFiniteInput& found,
                                                   std::string_view values);

// Counters since the exchange was made; exchange_counters.def describes each.
struct ExchangeStats {
#define GW_EXCHANGE_COUNTER(type, name, python_name) type name = 0;
#include "gradwire/exchange_counters.def"
#undef GW_EXCHANGE_COUNTER
};

// A residual whose norm was found above most_inputs(type) times that of its input.
//
// Above kMostInputs error feedback does not catch up: what is sent is old, and in a ring of 3lc
// soon larger than any gradient. The input of a push is the rank's own gradient, also in a ring. A
// residual in bfloat16 loses values long before: it has 8 significant bits, so what is added to a
// value 512 times as large is rounded away. Above kMostInputsOfBfloat16, some per cent of a
// constant input are lost (docs/results/codecs.md and error_feedback.md show which codecs do not).
struct OutgrownResidual {
  Direction direction;
  std::string tensor;
  uint64_t step;
  double factor;  // norm of the residual / largest norm of the input in the last steps
  ResidualType type;
};
inline constexpr double kMostInputs = 100;
inline constexpr double kMostInputsOfBfloat16 = 32;
[[nodiscard]] constexpr double most_inputs(ResidualType type) {
  return type == ResidualType::kBfloat16 ? kMostInputsOfBfloat16 : kMostInputs;
}

// What this rank has encoded of a tensor so far: values, and the bytes of their frames' payloads,
// without headers. As in ExchangeStats, a pull counts once, whoever gets it.
struct TensorTraffic {
  uint64_t values_pushed = 0;
  uint64_t push_payload_bytes = 0;
  uint64_t values_pulled = 0;
  uint64_t pull_payload_bytes = 0;
};

// A piece of a residual with its place, for checkpoints.
struct ResidualPiece {
  Direction direction;
  std::string tensor;
  uint64_t offset;  // first value in the tensor
  std::vector<float> values;
};

// The result of an exchange: the mean over all ranks, or the sum.
enum class Reduction : uint8_t { kAverage, kSum };

// kPeerMismatch if two ranks' descriptions differ; the message shows both versions of the first
// line that differs.
GRADWIRE_EXPORT Status compare_descriptions(uint32_t rank, std::string_view description,
                                            uint32_t peer, std::string_view peer_description);

// A collective algorithm without input or output, which averages a bucket over all ranks. An engine
// moves its messages:
//
//   start(bucket, step); then, until done():
//     send what take_outgoing() hands out; receive one message from each rank in awaiting(),
//     in any order, and hand it to receive(). If awaits_any(), receive one message from any rank.
//
// After a failed start or receive the exchange can't go on, and no rank may use this step's bucket.
class GRADWIRE_EXPORT Exchange {
 public:
  virtual ~Exchange() = default;

  // A text that must be equal on all ranks. check_peer compares it before the first step.
  [[nodiscard]] virtual std::string describe() const = 0;
  // As compare_descriptions, for this rank's own description.
  [[nodiscard]] Status check_peer(uint32_t peer, std::string_view description) const;

  // Begins a step on a bucket of layout.numel() values, in which the exchange works until it is
  // done. Messages of the previous step that were not taken are dropped.
  virtual Status start(std::span<float> bucket, uint64_t step) = 0;
  // Sets what is called from the next start on. false: this exchange calls nothing, and needs a
  // bucket whose values have all arrived.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual bool set_events(StepEvents) { return false; }
  // Hands out the messages that are ready to be sent, each once.
  virtual std::vector<OutgoingMessage> take_outgoing() = 0;
  // The ranks from which a message must come before the algorithm can go on, ascending.
  [[nodiscard]] virtual std::vector<uint32_t> awaiting() const = 0;
  // Whether the algorithm may go on without some of these ranks. An engine then takes messages from
  // any of them and must not wait for a certain rank.
  [[nodiscard]] virtual bool awaits_any() const { return false; }
  // Ranks whose messages may be handed over at any time, also when they are not awaited and when
  // the step is done. A message of any other rank may be handed over only if it is awaited. Empty
  // except for exchanges whose ranks go on at their own pace.
  [[nodiscard]] virtual std::vector<uint32_t> listening() const { return {}; }
  // No message for this rank has more bytes, in any step. An engine that learns a message's size
  // before its bytes refuses a larger one, by check_size, before it takes memory for it.
  [[nodiscard]] virtual uint64_t max_message_size() const = 0;
  // kLimitExceeded, naming the peer, the size and the limit: the peer's message is larger.
  [[nodiscard]] Status check_size(uint32_t peer, uint64_t size) const;
  // Takes a message that came from `peer`, and uses or copies it before it returns.
  virtual Status receive(uint32_t peer, std::span<const std::byte> message) = 0;
  // Whether the bucket holds the result, the same bits on every rank.
  [[nodiscard]] virtual bool done() const = 0;
  // The value that made this step's result NaN; nothing if the result is finite.
  [[nodiscard]] virtual const std::optional<NonFiniteInput>& non_finite() const = 0;

  // Whether any segment has a residual on any rank. Only then is a step with NaN or Inf marked as
  // not finite; otherwise the values are exchanged as they are. TernGrad's exchange always marks
  // such a step.
  [[nodiscard]] virtual bool keeps_residuals() const noexcept = 0;
  // This rank's residuals that outgrew their inputs, each tensor once in each direction, in the
  // order in which they were found. Every 16th step is examined. The input that counts is the
  // largest of the last steps; an input of 1024 steps ago counts half.
  [[nodiscard]] virtual std::vector<OutgrownResidual> outgrown_residuals() const = 0;
  // Of every tensor, in the layout's order.
  [[nodiscard]] virtual std::vector<TensorTraffic> tensor_traffic() const = 0;
  // Call it after a step whose result no rank applied: the values that the step sent go back into
  // the residuals of the ranks that sent them. Values that an owner had averaged go into the
  // owner's residual. At most once after each step, when it is done.
  virtual void retract() = 0;
  // Multiplies all residuals by `factor`, for gradients whose scale changed by that factor (a
  // gradient scaler's new scale divided by its old scale).
  virtual void scale_residuals(float factor) = 0;

  [[nodiscard]] virtual std::vector<ResidualPiece> export_residuals() const = 0;
  // Adds a piece to the residuals. If the owner of its values changed, a push residual may have to
  // become a pull residual, or the reverse. The values are then scaled so that mean(push
  // residuals) + pull residual stays the same: in an average a push residual counts 1/N (in a sum
  // 1), the owner's pull residual 1. A lone rank adds the imported values to its next step. Values
  // whose segment keeps no residual are dropped. kInvalidArgument: no such tensor or range.
  // kNonFinite: a value is NaN or Inf.
  virtual Status import_residual(const ResidualPiece& piece) = 0;

  // The bytes of this rank's residuals. 0 where they lie in the memory of a device.
  [[nodiscard]] virtual uint64_t residual_bytes() const { return 0; }
  // From now on the residuals are the values in `memory`, of residual_bytes(), aligned for floats.
  // The caller keeps it, and may change where it lies, or what it holds, between two calls. Imports
  // of a lone rank are elsewhere.
  virtual void keep_residuals_in(std::span<std::byte> memory) { (void)memory; }

  [[nodiscard]] virtual const ExchangeStats& stats() const noexcept = 0;
  [[nodiscard]] virtual const Layout& layout() const noexcept = 0;

 protected:
  [[nodiscard]] virtual uint32_t rank() const = 0;
};

// A function that replaces the averages of an owner's shard, in place, before all ranks get them:
// for example by the model's change if optimizer states are sharded. It gets the bucket, in which
// the segments of this owner hold their averages. A failure ends the exchange.
using ShardUpdate = std::function<Status(std::span<float> bucket)>;

// A function of a worker that adds a finished version of one server's tensors to the worker's
// model: the segments of this server in `delta` (layout.numel() values). Versions come one by one,
// in order, so that all workers round alike. A failure ends the exchange.
using ApplyDelta =
    std::function<Status(uint32_t server, uint64_t version, std::span<const float> delta)>;

struct ExchangeOptions {
  uint64_t seed = 0;  // of the draws
  Reduction reduction = Reduction::kAverage;
  ShardUpdate update = {};  // only for sharded, and for a server that has a model
  ApplyDelta apply = {};    // only for a worker of servers
  // Only for hierarchical: the machine of every rank, as any numbers. Empty: consecutive ranks
  // share a machine, as many as the parameter `ranks` says.
  std::vector<uint32_t> machine_of_rank = {};
};

// Makes the exchange of one rank from a text such as "ring" or "hierarchical:between=ring,ranks=4".
// kInvalidArgument: an unknown exchange (the message lists what is valid); a rank that is not below
// the layout's world size; an option that the exchange does not take. The exchanges are:
//
// sharded: a two-phase all-reduce (3LC's servers, section 3, co-located with the workers).
//
//   push  every rank encodes each shard for its owner; 1 packet to each of the N - 1 others
//   pull  the owner adds the pushes to its own part in ascending order of ranks, divides by N
//         (unless the sum is wanted), encodes once, and sends all others the same bytes, which it
//         decodes itself as well
//
// Bytes sent by a rank for n values at b bits: (N - 1) / N * n * b / 8 each way, plus headers; 2
// messages on the longest way. The owner's own part costs no traffic, so it is added exactly,
// without quantization. Every value is quantized twice, whatever N is; error feedback in both
// directions keeps the error of the running sum bounded.
//
// With an `update`, each owner's optimizer steps its shard between push and pull. The pull then
// carries the result (the model delta) plus the owner's residual. A step that is not finite is not
// updated.
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
// error feedback the variance of the sum's error is N / 2 times that of the sharded exchange. From
// hop to hop the largest value can grow by Codec::scale_growth(): 3lc is not for large rings.
//
// broadcast: every rank sends all of its values to all others (QSGD, algorithm 1).
//
//   push  every rank encodes its whole bucket once and sends all others the same packet. Each rank
//         decodes the packets of all ranks, its own included, adds them in ascending order of ranks
//         and divides by N (unless the sum is wanted)
//
// Bytes sent by a rank for n values at b bits: (N - 1) * n * b / 8, plus headers; 1 message on the
// longest way. That is N / 2 times what the sharded exchange sends: as much with 2 ranks, and more
// from N = 3 on. Every value is quantized once, whatever N is, so with an unbiased codec the
// variance of the mean's error is 1 / N of one encoding's, where the pull of the sharded exchange
// adds that of a whole encoding. No rank owns values: the layout's owners are ignored, every tensor
// is encoded whole, and error feedback keeps a residual of all values on each rank. A tensor has
// one codec (kInvalidArgument: its pull codec is another).
//
// terngrad: TernGrad's exchange (sections 3 and 4: scaler sharing, parameter localization).
// Gradients travel both ways, never parameters, and sums of trits are added without being decoded.
//
//   max   every rank sends every other the largest clipped magnitude of each tensor, or of each
//         group if terngrad has groups: the largest of all ranks is the scale of all ranks
//   push  every rank draws its trits with these scales and sends each shard to its owner
//   pull  the owner draws its own part too, adds the trits as integers, and sends the sums to all
//         ranks without further quantization: frames of qsgd with levels from -N to N and the unit
//         scale / N, which decode to sum * scale / N
//
// Bytes sent by a rank for n values and S scales: (N - 1) * 4 S in the max round, (N - 1) / N * n *
// 2 / 8 each push (1.6 bits with pack=trits5, less with a coder) and (N - 1) / N * n *
// ceil(log2(2 N + 1)) / 8 each pull, each with its scales, (N - 1) / N * 4 S, plus headers; 3
// messages on the longest way. Only the draws add an error. The expected result is the mean of the
// clipped gradients, so no residual is kept. Its variance at a value is the mean over ranks of |b|
// (scale - |b|), divided by N. The sharded exchange draws its pulls again, with the full variance
// whatever N is.
//
// The layout's push codec is terngrad without error feedback. A segment may also have another codec
// without a residual, such as raw; it then travels as in the sharded exchange. The pull codec is
// terngrad with the same parameters, which stands for qsgd with the bits that the sums need, or, to
// choose another coder, qsgd with levels=N and groups that fit into terngrad's. In the max round
// each rank reports a gradient that is not finite, and the result is NaN everywhere, with raw
// layouts too. At most 8191 ranks can take part.
//
// hierarchical: a hierarchical all-reduce (INCEPTIONN, figure 1). The lowest rank of each machine
// is its speaker:
//
//   within   the ranks of a machine average their buckets; without the parameter `within`, they
//            send them to the speaker, which adds them in ascending order of ranks
//   between  the speakers average over the machines by another exchange; or all add, and nobody
//            divides
//   result   the speaker encodes the result once and sends it to the ranks of its machine; with
//            within=ring to its neighbour, and each rank passes the bytes on
//
// With within=ring,between=ring these are the rings in groups of figure 1 (c). `within_codec`
// encodes the legs inside a machine, without a residual; raw by default. The layout's codecs encode
// the leg between the machines, and tensors that go raw there go raw inside, too.
//
// `layout` is that of the speakers: its world size is the number of machines. Bytes on the network
// are those of the inner exchange with N = machines. Inside a machine of k ranks, a rank sends
// those of `within` with N = k and n * b / 8 for the result, which the last rank of a ring does not
// pass on; without `within`, n * b / 8 go to and from each of k - 1 ranks. The longest way has the
// messages of both exchanges, and 1 more for the result (k - 1 in a ring). The errors of the legs
// add up, and a compressed result adds that of one more encoding. The marker of a step that is not
// finite names the speaker's rank.
//
// server: workers push to dedicated servers, the last ranks of a layout with `servers`, and pull
// what these made of the average (3LC, sections 2 and 3). It is described in gradwire/server.h.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_exchange(
    std::string_view text, std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    ExchangeOptions options = {});

// Only the push of the sharded exchange: at the end the segments that this rank owns hold their
// average or sum, and the others unspecified values. A rank sends (N - 1) / N * n * b / 8 bytes;
// the longest way has 1 message; each value that does not come from the owner itself is quantized
// once.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    const ExchangeOptions& options = {});

// Only the pull of the sharded exchange: every owner encodes its segments once, and all ranks, the
// owner included, end with the decoded values. An owner of n values sends (N - 1) * n * b / 8
// bytes; the longest way has 1 message.
GRADWIRE_EXPORT Result<std::unique_ptr<Exchange>> make_allgather_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    const ExchangeOptions& options = {});

}  // namespace gradwire
