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
// stays an int, and whoever waits for a large message on a slow link sees it come.
class Wire {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;

  // Uses `tag` and the one behind it.
  Wire(const Communicator& communicator, int tag, double timeout_seconds);

  // Starts sending. `bytes` stay as they are until sends_pending() is false; where something keeps
  // them, it is held as long as they are needed.
  Status send(uint32_t peer, std::span<const std::byte> bytes,
              const std::shared_ptr<const void>& keep = {});

  // Who may send, and who has to.
  struct Peers {
    std::span<const uint32_t> awaited;         // each of them ...
    bool any = false;                          // ... or, where this is set, one of them
    std::span<const uint32_t> listening = {};  // taken from as well
    bool flushing = false;                     // kept messages, too, have to go out
  };
  using OnMessage = std::function<Status(uint32_t peer, std::span<const std::byte> message)>;
  // Moves what can be moved, and hands over the first message that is whole. Returns whether
  // anything came. kPeerLost as Engine::test says.
  //
  // Each rank is probed by itself: messages of unknown size come piece by piece from several ranks
  // at the same time, which MPI_ANY_SOURCE would mix, and nobody can starve anybody, as no rank may
  // be ahead of its answers by more than a few messages.
  Result<bool> poll(const Peers& peers, const OnMessage& on_message);

  // Whether messages that nothing keeps are on their way; kept ones are no hindrance.
  [[nodiscard]] bool sends_pending() const noexcept;
  [[nodiscard]] bool any_sends_pending() const noexcept { return !sends_.empty(); }

  // What a rank may tell others of itself beside its messages.
  enum class News : uint32_t {
    kAwaits,  // it has waited for half the timeout for a rank, or no longer does
    kOver,    // of a server: it begins no version any more, and only answers
    kLeft,    // nothing comes from it any more
  };
  Status tell(uint32_t peer, News news);
  // To be called before heard(): what the others told.
  Status take_news();
  // Whether the peer told so, and all that it sent before came here.
  [[nodiscard]] bool heard(uint32_t peer, News news) const;

  // Whether MPI may still read or write memory given to it here.
  [[nodiscard]] bool in_use() const noexcept;

  [[nodiscard]] uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  [[nodiscard]] uint64_t bytes_received() const noexcept { return bytes_received_; }

 private:
  static constexpr uint32_t kNobody = ~uint32_t{0};

  struct Sending {
    uint32_t peer;
    std::shared_ptr<const void> keep;
  };
  struct Incoming {
    std::vector<std::byte> bytes;  // only grows
    uint64_t used = 0;
    uint64_t messages = 0;  // whole ones
    MPI_Request request = MPI_REQUEST_NULL;
    double silent_seconds = 0;  // of those in which this rank waited for it and looked
  };
  struct Word {
    uint32_t rank;      // who tells
    uint32_t awaiting;  // kAwaits: the rank it waits for
    uint64_t messages;  // that it had sent to whom it tells
    News news;
  };
  // What a rank told last.
  struct Told {
    uint32_t awaiting = kNobody;
    std::optional<uint64_t> over;  // its messages before
    std::optional<uint64_t> left;
  };

  Status complete_sends();
  Result<bool> advance(Incoming& incoming, uint32_t peer, bool& whole);
  // Something of the peer's moved.
  Status note_life(uint32_t peer);
  Status watch(const Peers& peers);
  [[nodiscard]] std::vector<uint32_t> due(const Peers& peers) const;
  Status name_lost(const std::vector<uint32_t>& silent);
  Status send_word(uint32_t peer, News news, uint32_t awaiting);
  Status tell_waiting(uint32_t awaiting);
  // The rank at the end of the chain of those who wait for each other.
  [[nodiscard]] uint32_t find_silent(uint32_t awaiting) const;

  const Communicator& communicator_;
  int tag_;
  double timeout_;
  std::vector<MPI_Request> sends_;
  std::vector<Sending> sending_;  // of each
  std::vector<int> completed_;
  std::vector<Incoming> incoming_;                                    // of each rank
  std::vector<uint64_t> messages_sent_;                               // to each rank
  std::vector<std::pair<std::unique_ptr<Word>, MPI_Request>> words_;  // on their way
  std::vector<Told> told_by_;                                         // each rank
  uint32_t told_awaiting_ = kNobody;                                  // by this one
  bool any_ = false;                                                  // of the last poll
  std::chrono::steady_clock::time_point last_poll_ = {};
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace gradwire::mpi
