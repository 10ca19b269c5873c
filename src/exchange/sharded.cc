#include <algorithm>
#include <cmath>
#include <utility>

#include "base/checksum.h"
#include "base/return_if_error.h"
#include "exchange/sharded_state.h"

namespace gradwire {
ShardedExchange::ShardedExchange(std::unique_ptr<State> state) : state_(std::move(state)) {}
ShardedExchange::~ShardedExchange() = default;

Result<std::unique_ptr<ShardedExchange>> ShardedExchange::create(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution, uint64_t seed) {
  if (rank >= layout->world_size()) {
    return Status(StatusCode::kInvalidArgument, "rank " + std::to_string(rank) +
                                                    " is not below the world size " +
                                                    std::to_string(layout->world_size()));
  }
  auto state = std::make_unique<State>(std::move(layout), rank, std::move(execution), seed);
  GW_RETURN_IF_ERROR(state->make_writers());
  std::unique_ptr<ShardedExchange> exchange(new ShardedExchange(std::move(state)));
  const std::string description = exchange->describe();
  exchange->state_->digest = digest64({std::as_bytes(std::span(description))});
  return exchange;
}

std::string ShardedExchange::describe() const {
  return "exchange sharded\n" + state_->layout->describe();
}

uint32_t ShardedExchange::rank() const { return state_->rank; }
bool ShardedExchange::done() const { return state_->done(); }
const std::optional<NonFiniteInput>& ShardedExchange::non_finite() const {
  return state_->non_finite;
}
const ExchangeStats& ShardedExchange::stats() const noexcept { return state_->stats; }
const Layout& ShardedExchange::layout() const noexcept { return *state_->layout; }

Status ShardedExchange::start(std::span<float> bucket, uint64_t step) {
  State& state = *state_;
  if (!state.done()) return unexpected("start: the step before has not ended");
  if (bucket.size() != state.layout->numel()) {
    return {StatusCode::kLengthMismatch,
            "start: the layout has " + std::to_string(state.layout->numel()) +
                " values, the bucket " + std::to_string(bucket.size())};
  }
  state.begin_step(bucket, step);
  if (state.world_size() == 1) {
    if (state.keeps_residuals) state.pay_residuals();
    return {};
  }
  GW_RETURN_IF_ERROR(state.encode_pushes());
  return {};
}

std::vector<OutgoingMessage> ShardedExchange::take_outgoing() {
  return std::exchange(state_->outgoing, {});
}

std::vector<uint32_t> ShardedExchange::awaiting() const {
  const State& state = *state_;
  const std::vector<Arrival>& arrivals =
      state.pushes_missing > 0 ? state.push_arrivals : state.pull_arrivals;
  std::vector<uint32_t> peers;
  if (state.done()) return peers;
  for (uint32_t peer = 0; peer < state.world_size(); ++peer) {
    if (peer != state.rank && arrivals[peer] == Arrival::kMissing) peers.push_back(peer);
  }
  return peers;
}

Status ShardedExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  State& state = *state_;
  Result<Packet> parsed = parse_packet(message);
  if (!parsed.ok()) {
    return {parsed.status().code(),
            "message from rank " + std::to_string(peer) + ": " + parsed.status().message()};
  }
  const Packet& packet = parsed.value();
  GW_RETURN_IF_ERROR(state.check_header(peer, packet.header));
  const bool push = packet.header.role == PacketRole::kPush;
  std::vector<Arrival>& arrivals = push ? state.push_arrivals : state.pull_arrivals;
  if (arrivals[peer] == Arrival::kHere) {
    return unexpected("rank " + std::to_string(peer) + " sent its " + (push ? "push" : "pull") +
                      " of step " + std::to_string(state.step) + " twice");
  }
  if (!packet.non_finite) {
    GW_RETURN_IF_ERROR(state.check_frames(peer, packet, push ? state.rank : peer));
  }
  arrivals[peer] = Arrival::kHere;
  if (push) {
    state.stats.push_bytes_received += message.size();
    return state.take_push(peer, packet, message);
  }
  state.stats.pull_bytes_received += message.size();
  return state.take_pull(peer, packet);
}

bool ShardedExchange::keeps_residuals() const noexcept { return state_->keeps_residuals; }

void ShardedExchange::retract() { state_->retract(); }

void ShardedExchange::scale_residuals(float factor) {
  for (Residual& residual : state_->residuals) residual.scale(factor);
}

std::vector<ResidualPiece> ShardedExchange::export_residuals() const {
  const State& state = *state_;
  std::vector<ResidualPiece> pieces;
  for (size_t i = 0; i < state.residuals.size(); ++i) {
    const Segment& segment = state.layout->segments()[i];
    if (state.residuals[i].type() == ResidualType::kNone) continue;
    pieces.push_back({.role = state.owns(segment) ? RuleScope::kPull : RuleScope::kPush,
                      .tensor = state.layout->tensors()[segment.tensor].name,
                      .offset = segment.tensor_offset,
                      .values = state.residuals[i].values()});
  }
  return pieces;
}

Status ShardedExchange::import_residual(const ResidualPiece& piece) {
  State& state = *state_;
  const std::vector<TensorInfo>& tensors = state.layout->tensors();
  const auto tensor = std::find_if(tensors.begin(), tensors.end(), [&](const TensorInfo& info) {
    return info.name == piece.tensor;
  });
  const uint64_t end = piece.offset + piece.values.size();
  if (tensor == tensors.end() || piece.offset > tensor->numel() || end > tensor->numel()) {
    return {StatusCode::kInvalidArgument,
            "residual of tensor '" + piece.tensor + "', values " + std::to_string(piece.offset) +
                ".." + std::to_string(end) + ": the layout has no such place"};
  }
  if (!std::ranges::all_of(piece.values, [](float value) { return std::isfinite(value); })) {
    return {StatusCode::kNonFinite, "residual of tensor '" + piece.tensor + "': not finite"};
  }
  const auto index = static_cast<uint32_t>(tensor - tensors.begin());
  const auto world = static_cast<float>(state.world_size());
  for (size_t i = 0; i < state.residuals.size(); ++i) {
    const Segment& segment = state.layout->segments()[i];
    if (segment.tensor != index) continue;
    const uint64_t first = std::max(segment.tensor_offset, piece.offset);
    const uint64_t last = std::min(segment.tensor_offset + segment.n, end);
    if (first >= last) continue;
    const bool pull_here = state.owns(segment);
    Residual& residual = state.residuals[i];
    if (state.world_size() == 1 && residual.type() != segment.pull_codec->residual_type()) {
      residual = Residual(segment.pull_codec->residual_type(), segment.n);
      state.keeps_residuals = true;
    }
    const bool pull_there = piece.role == RuleScope::kPull;
    const float factor = pull_here == pull_there ? 1.0f : pull_here ? 1.0f / world : world;
    residual.add(first - segment.tensor_offset,
                 std::span(piece.values).subspan(first - piece.offset, last - first), factor);
  }
  return {};
}

}  // namespace gradwire
