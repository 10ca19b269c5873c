#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "exchange/steps/endpoint.h"
#include "gradwire/exchange.h"

namespace gradwire {

// Checks that a step can begin on a bucket of so many values: kUnexpectedMessage, kLengthMismatch.
Status check_start(const Exchange& exchange, uint64_t values);

// An Exchange whose messages are the packets of an endpoint. An algorithm adds begin, take, done,
// awaiting and retract. Interface: Exchange, or a class derived from it.
template <typename Interface = Exchange>
class PacketExchange : public Interface {
 public:
  explicit PacketExchange(Endpoint endpoint) : endpoint_(std::move(endpoint)) {}

  std::string describe() const final { return endpoint_.describe(); }
  Status start(std::span<float> bucket, uint64_t step) final {
    GW_RETURN_IF_ERROR(check_start(*this, bucket.size()));
    endpoint_.begin(bucket, step);
    return begin();
  }
  bool set_events(StepEvents events) final {
    endpoint_.set_events(std::move(events));
    return true;
  }
  std::vector<OutgoingMessage> take_outgoing() final { return endpoint_.take_outgoing(); }
  uint64_t max_message_size() const final { return endpoint_.max_message_size(); }
  Status receive(uint32_t peer, std::span<const std::byte> message) final {
    GW_ASSIGN_OR_RETURN(ReceivedPacket received, endpoint_.open(peer, message));
    return take(std::move(received));
  }
  const std::optional<NonFiniteInput>& non_finite() const final {
    return endpoint_.origins().first();
  }

  std::vector<OutgrownResidual> outgrown_residuals() const final {
    return endpoint_.residuals().outgrown();
  }
  std::vector<TensorTraffic> tensor_traffic() const final { return endpoint_.traffic(); }
  bool keeps_residuals() const noexcept final { return endpoint_.residuals().kept(); }
  void scale_residuals(float factor) final { endpoint_.codec().scale_residuals(factor); }
  std::vector<ResidualPiece> export_residuals() const final {
    return endpoint_.residuals().export_pieces();
  }
  Status import_residual(const ResidualPiece& piece) final {
    return endpoint_.residuals().import_piece(piece);
  }
  uint64_t residual_bytes() const final { return endpoint_.residual_bytes(); }
  void keep_residuals_in(std::span<std::byte> memory) final {
    endpoint_.codec().keep_residuals_in(memory);
  }
  const ExchangeStats& stats() const noexcept final { return endpoint_.stats(); }
  const Layout& layout() const noexcept final { return endpoint_.layout(); }

 protected:
  // Called when the bucket is set and nothing of the step is sent.
  virtual Status begin() = 0;
  // Takes a packet of this exchange, which may be of any step.
  virtual Status take(ReceivedPacket received) = 0;
  [[nodiscard]] uint32_t rank() const final { return endpoint_.ranks().own(); }
  [[nodiscard]] const Ranks& ranks() const { return endpoint_.ranks(); }

  Endpoint endpoint_;
};

}  // namespace gradwire
