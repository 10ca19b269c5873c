#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/execution.h"
#include "gradwire/layout.h"
#include "gradwire/status.h"

namespace gradwire {

struct OutgoingMessage {
  uint32_t peer;                     // rank that gets it
  std::span<const std::byte> bytes;  // valid until the next start
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
  uint64_t pull_bytes_sent = 0;  // the one packet, once for each peer
  uint64_t pull_bytes_received = 0;
  uint64_t pull_bytes_encoded = 0;  // the one packet, once
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

// A collective algorithm without input or output. An engine moves its messages:
//
//   start(bucket, step); then, until done():
//     send what take_outgoing() hands out; receive one message from each rank in awaiting(),
//     in any order, and hand it to receive().
//
// After a failed start or receive the exchange can't go on: no rank may use this step's bucket.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // What must be equal on all ranks. Compared with check_peer before the first step.
  [[nodiscard]] virtual std::string describe() const = 0;
  // kPeerMismatch naming the first line in which the peer's description differs, and both versions.
  [[nodiscard]] Status check_peer(uint32_t peer, std::string_view description) const;

  // Begins a step on a bucket of layout.numel() values, which the exchange works in until done.
  virtual Status start(std::span<float> bucket, uint64_t step) = 0;
  // Messages that are ready and were not yet handed out.
  virtual std::vector<OutgoingMessage> take_outgoing() = 0;
  // Ranks from which a message is due before the algorithm can go on, ascending.
  [[nodiscard]] virtual std::vector<uint32_t> awaiting() const = 0;
  // A message came. It is used or copied before this returns.
  virtual Status receive(uint32_t peer, std::span<const std::byte> message) = 0;
  // The bucket holds the result, the same bits on every rank.
  [[nodiscard]] virtual bool done() const = 0;
  // Why this step's result is NaN; nothing where it is not.
  [[nodiscard]] virtual const std::optional<NonFiniteInput>& non_finite() const = 0;

 protected:
  [[nodiscard]] virtual uint32_t rank() const = 0;
};

// Two-phase all-reduce to the average (3LC's servers, section 3, co-located with the workers):
//
//   push  every rank encodes each shard for its owner; 1 packet to each of the N - 1 others
//   pull  the owner adds the pushes to its own part in ascending order of ranks, divides by N,
//         encodes once, and sends everyone the same bytes, which it decodes itself as well
//
// Bytes sent by a rank for n values at b bits: (N - 1) / N * n * b / 8 each way, plus headers. The
// owner's own part is added exactly: it costs no traffic, so it isn't quantized. Error feedback on
// both ways keeps the error of the running sum bounded, whatever N.
class ShardedExchange final : public Exchange {
 public:
  // kInvalidArgument: rank is not below the layout's world size.
  static Result<std::unique_ptr<ShardedExchange>> create(std::shared_ptr<const Layout> layout,
                                                         uint32_t rank, Execution execution,
                                                         uint64_t seed = 0);
  ~ShardedExchange() override;

  std::string describe() const override;
  Status start(std::span<float> bucket, uint64_t step) override;
  std::vector<OutgoingMessage> take_outgoing() override;
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;
  bool done() const override;
  const std::optional<NonFiniteInput>& non_finite() const override;

  // Whether any segment has a residual on any rank. Only then is a step that is not finite marked.
  [[nodiscard]] bool keeps_residuals() const noexcept;
  // For a step whose result nobody applied: what the last step sent goes back into the residuals of
  // those who sent it, or, where an owner had averaged it, into the owner's. Once a step, when
  // done.
  void retract();
  // For inputs whose unit changed by `factor` (a gradient scaler's new scale over its old one).
  void scale_residuals(float factor);

  [[nodiscard]] std::vector<ResidualPiece> export_residuals() const;
  // Adds a piece to the residuals. Where this layout gives its values another role (the owner
  // changed), they are carried over at the weight that keeps mean(push residuals) + pull residual:
  // a push residual counts 1/N in the average, the owner's pull residual counts whole. A lone
  // rank pays what it took over with its next step. Values whose segment keeps no residual are
  // dropped. kInvalidArgument: no such tensor or range. kNonFinite: a value is NaN or Inf.
  Status import_residual(const ResidualPiece& piece);

  [[nodiscard]] const ExchangeStats& stats() const noexcept;
  [[nodiscard]] const Layout& layout() const noexcept;

 protected:
  uint32_t rank() const override;

 private:
  struct State;
  explicit ShardedExchange(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace gradwire
