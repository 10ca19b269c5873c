#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "exchange/steps/endpoint.h"
#include "gradwire/exchange.h"

namespace gradwire {

// Whether a step can begin on a bucket of so many values: kUnexpectedMessage, kLengthMismatch.
Status check_start(const Exchange& exchange, uint64_t values);

// The Exchange that takes its steps as `Steps` says, an algorithm on an endpoint:
//
//   Status begin()                  the bucket is set, nothing of the step is sent
//   Status receive(ReceivedPacket)  a packet of this exchange, of any step
//   bool done() const; std::vector<uint32_t> awaiting() const; void retract()
//
// Interface: Exchange, or what adds to it.
template <typename Steps, typename Interface = Exchange>
class PacketExchange : public Interface {
 public:
  template <typename... Arguments>
  explicit PacketExchange(Endpoint endpoint, Arguments&&... arguments)
      : endpoint_(std::move(endpoint)), steps_(endpoint_, std::forward<Arguments>(arguments)...) {}

  std::string describe() const final { return endpoint_.describe(); }
  Status start(std::span<float> bucket, uint64_t step) final {
    GW_RETURN_IF_ERROR(check_start(*this, bucket.size()));
    endpoint_.begin(bucket, step);
    return steps_.begin();
  }
  std::vector<OutgoingMessage> take_outgoing() final { return endpoint_.take_outgoing(); }
  std::vector<uint32_t> awaiting() const final { return steps_.awaiting(); }
  Status receive(uint32_t peer, std::span<const std::byte> message) final {
    Result<ReceivedPacket> received = endpoint_.open(peer, message);
    return received.ok() ? steps_.receive(std::move(received).value()) : received.status();
  }
  bool done() const final { return steps_.done(); }
  const std::optional<NonFiniteInput>& non_finite() const final { return endpoint_.non_finite(); }

  bool keeps_residuals() const noexcept final { return endpoint_.keeps_residuals(); }
  void retract() final { steps_.retract(); }
  void scale_residuals(float factor) final { endpoint_.codec().scale_residuals(factor); }
  std::vector<ResidualPiece> export_residuals() const final { return endpoint_.export_residuals(); }
  Status import_residual(const ResidualPiece& piece) final {
    return endpoint_.import_residual(piece);
  }
  const ExchangeStats& stats() const noexcept final { return endpoint_.stats(); }
  const Layout& layout() const noexcept final { return endpoint_.layout(); }

 protected:
  [[nodiscard]] uint32_t rank() const final { return endpoint_.rank(); }
  [[nodiscard]] Steps& steps() { return steps_; }
  [[nodiscard]] const Steps& steps() const { return steps_; }

 private:
  Endpoint endpoint_;
  Steps steps_;
};

}  // namespace gradwire
