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

// Messages of any size between this rank and its peers, in order from each, without ever waiting.
//
// A message goes in pieces of kPieceBytes; one that is shorter (or empty) is the last. So a count
// stays an int, and a rank that waits for a large message on a slow link sees it come.
class Wire {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
  static constexpr uint32_t kNobody = ~uint32_t{0};

  // Uses `tag` and the next one.
  Wire(const Communicator& communicator, int tag, double timeout_seconds);

  // Starts sending. `bytes` stay as they are until sends_pending() is false; `keep`, which may own
  // them, is held as long as they are needed.
  Status send(uint32_t peer, std::span<const std::byte> bytes,
              const std::shared_ptr<const void>& keep = {});

  // The ranks that may send, and those that have to.
  struct Peers {
    std::span<const uint32_t> awaited;         // each of them ...
    bool any = false;                          // ... or, where this is set, one of them
    std::span<const uint32_t> listening = {};  // messages of these are taken as well
    bool flushing = false;                     // kept messages, too, have to go out
  };
  using OnMessage = std::function<Status(uint32_t peer, std::span<const std::byte> message)>;
  // Moves what can be moved, and hands over the first message that is whole. Returns whether
  // anything came. kPeerLost as Engine::test says.
  //
  // Each rank is probed by itself: messages of unknown size come piece by piece from several ranks
  // at the same time, which MPI_ANY_SOURCE would mix. No rank starves another, as none may be ahead
  // of its answers by more than a few messages.
  Result<bool> poll(const Peers& peers, const OnMessage& on_message);

  // Whether messages without a `keep` are on their way.
  [[nodiscard]] bool sends_pending() const noexcept;
  [[nodiscard]] bool any_sends_pending() const noexcept { return !sends_.empty(); }

  // What ranks send each other about themselves, beside the messages.
  enum class Notice : uint32_t {
    kAwaits,  // it has waited for half the timeout for a rank, or no longer does
    kOver,    // of a server: it begins no further version, and only answers
    kLeft,    // nothing more comes from it
  };
  Status send_notice(uint32_t peer, Notice notice, uint32_t awaiting = kNobody);
  // To be called before heard().
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
    std::vector<std::byte> bytes;  // of its message, as far as it came; only grows
    uint64_t used = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    uint64_t messages_received = 0;  // whole ones
    uint64_t messages_sent = 0;
    double silent_seconds = 0;  // of those in which this rank waited for it and looked
    // From its last notices:
    uint32_t awaiting = kNobody;
    std::optional<uint64_t> over;  // messages that it had sent before
    std::optional<uint64_t> left;
  };
  struct NoticeMessage {
    uint32_t rank;      // the sender
    uint32_t awaiting;  // kAwaits: the rank that it waits for
    uint64_t messages;  // that it had sent to the receiver
    Notice notice;
  };

  Status complete_sends();
  // Whether anything of the peer's message came; whole: and that was the rest of it.
  Result<bool> advance(uint32_t peer, bool& whole);
  // Something moved from or to the peer.
  Status note_life(uint32_t peer);
  Status watch(const Peers& peers);
  Status name_lost(const std::vector<uint32_t>& silent);
  Status send_awaiting(uint32_t awaiting);
  // The rank at the end of a chain of ranks that wait for each other.
  [[nodiscard]] uint32_t find_silent(uint32_t awaiting) const;

  const Communicator& communicator_;
  int tag_;
  double timeout_;
  std::vector<MPI_Request> sends_;
  std::vector<Sending> sending_;  // of each
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
