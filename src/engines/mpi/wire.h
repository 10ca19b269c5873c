#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engines/mpi/communicator.h"
#include "gradwire/status.h"

namespace gradwire::mpi {

// Sends and receives messages of any size without ever waiting. The messages of each peer arrive in
// order. A message is sent in pieces of kPieceBytes; a shorter (or empty) piece is the last. So a
// count fits in an int, and a rank that waits for a large message on a slow link sees it arrive.
class Wire {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
  static constexpr uint32_t kNobody = ~uint32_t{0};

  // Uses `tag` and the next one.
  Wire(const Communicator& communicator, int tag, double timeout_seconds);

  // Starts sending. `bytes` must stay unchanged until sends_pending() is false. `keep`, which may
  // own the bytes, is held as long as they are needed.
  Status send(uint32_t peer, std::span<const std::byte> bytes,
              const std::shared_ptr<const void>& keep = {});

  // The ranks that may send, and the ranks that must.
  struct Peers {
    std::span<const uint32_t> awaited;         // each of them ...
    bool any = false;                          // ... or, if this is set, any of them
    std::span<const uint32_t> listening = {};  // if not empty: whose messages are taken
    bool flushing = false;                     // messages with a `keep` must be sent, too
    uint64_t max_size = 0;                     // bytes of a message that may come
  };
  using OnMessage = std::function<Status(uint32_t peer, std::span<const std::byte> message)>;
  // Sends and receives without waiting, and passes on the first complete message. Returns whether
  // anything was received. kPeerLost as in Engine::test. kLimitExceeded, before memory is taken for
  // them: more bytes of a message have come than it may have.
  //
  // Each rank is probed separately: several ranks send the pieces of their messages at the same
  // time, and MPI_ANY_SOURCE would mix the pieces. No rank starves another, as a rank may send only
  // a few messages before it gets an answer.
  Result<bool> poll(const Peers& peers, const OnMessage& on_message);

  // Whether messages without a `keep` are on their way.
  [[nodiscard]] bool sends_pending() const noexcept;
  // Whether any message to this peer is.
  [[nodiscard]] bool sends_pending_to(uint32_t peer) const noexcept;
  [[nodiscard]] bool any_sends_pending() const noexcept { return !sends_.empty(); }

  // What a rank tells other ranks about itself, in addition to the messages.
  enum class Notice : uint32_t {
    kAwaits,  // it has waited for a rank for half the timeout, or no longer waits
    kOver,    // sent by a server: it begins no further version, and only answers
    kLeft,    // it sends nothing more
  };
  Status send_notice(uint32_t peer, Notice notice, uint32_t awaiting = kNobody);
  // Must be called before heard().
  Status receive_notices();
  // Whether the peer's notice and all messages that it had sent before have arrived.
  [[nodiscard]] bool heard(uint32_t peer, Notice notice) const;

  // Whether MPI may still read or write memory given to it here.
  [[nodiscard]] bool in_use() const noexcept;

  [[nodiscard]] uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  [[nodiscard]] uint64_t bytes_received() const noexcept { return bytes_received_; }

 private:
  struct Sending {
    uint32_t peer;
    std::shared_ptr<const void> keep;
  };
  struct Peer {
    std::vector<std::byte> bytes;  // the part of its message that has arrived; never shrinks
    uint64_t used = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    uint64_t messages_received = 0;  // complete messages
    uint64_t messages_sent = 0;
    double silent_seconds = 0;  // while this rank waited for it and polled
    // From its last notices:
    uint32_t awaiting = kNobody;
    std::optional<uint64_t> over;  // how many messages it had sent before this notice
    std::optional<uint64_t> left;
  };
  struct NoticeMessage {
    uint32_t rank;      // the sender
    uint32_t awaiting;  // kAwaits: the rank that it waits for
    uint64_t messages;  // how many the sender had sent to the receiver before
    Notice notice;
  };

  Status complete_sends();
  // Returns whether a piece of the peer's message arrived; `whole` becomes whether it was the last.
  Result<bool> advance(uint32_t peer, uint64_t max_size, bool& whole);
  // Notes that something was received from or sent to the peer.
  Status note_life(uint32_t peer);
  Status watch(const Peers& peers);
  Status name_lost(const std::vector<uint32_t>& silent);
  Status send_awaiting(uint32_t awaiting);
  // Follows the chain of ranks that wait for each other, and returns the rank at its end.
  [[nodiscard]] uint32_t find_silent(uint32_t awaiting) const;

  const Communicator& communicator_;
  int tag_;
  double timeout_;
  std::vector<MPI_Request> sends_;
  std::vector<Sending> sending_;  // for each of sends_
  std::vector<int> completed_;
  std::vector<Peer> peers_;                                                      // by rank
  std::vector<std::pair<std::unique_ptr<NoticeMessage>, MPI_Request>> notices_;  // on their way
  uint32_t sent_awaiting_ = kNobody;  // in this rank's last notice
  bool any_ = false;                  // of the last poll
  std::chrono::steady_clock::time_point last_poll_ = {};
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace gradwire::mpi
