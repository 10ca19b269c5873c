#include "engines/mpi/wire.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

namespace gradwire::mpi {
namespace {

// A longer gap between two polls counts as this: a rank that computes in between receives nothing.
constexpr double kLongestGap = 0.1;

Status no_such_rank(uint32_t peer, const Communicator& communicator) {
  return {StatusCode::kInvalidArgument, "the exchange has a rank " + std::to_string(peer) +
                                            ", the communicator only " +
                                            std::to_string(communicator.size()) + " ranks"};
}

}  // namespace

Wire::Wire(const Communicator& communicator, int tag, double timeout_seconds)
    : communicator_(communicator),
      tag_(tag),
      timeout_(timeout_seconds),
      peers_(communicator.size()) {}

Status Wire::send(uint32_t peer, std::span<const std::byte> bytes,
                  const std::shared_ptr<const void>& keep) {
  if (peer >= communicator_.size()) return no_such_rank(peer, communicator_);
  bytes_sent_ += bytes.size();
  ++peers_[peer].messages_sent;
  for (bool last = false; !last;) {
    const std::span<const std::byte> piece =
        bytes.first(std::min<uint64_t>(bytes.size(), kPieceBytes));
    bytes = bytes.subspan(piece.size());
    last = piece.size() < kPieceBytes;
    MPI_Request request = MPI_REQUEST_NULL;
    GW_MPI(MPI_Isend, piece.data(), static_cast<int>(piece.size()), MPI_BYTE,
           static_cast<int>(peer), tag_, communicator_.handle(), &request);
    sends_.push_back(request);
    sending_.push_back({.peer = peer, .keep = keep});
  }
  return {};
}

Status Wire::complete_sends() {
  std::erase_if(notices_, [](auto& notice) {
    int sent = 0;
    MPI_Test(&notice.second, &sent, MPI_STATUS_IGNORE);
    return sent != 0;
  });
  if (sends_.empty()) return {};
  completed_.resize(sends_.size());
  int count = 0;
  GW_MPI(MPI_Testsome, static_cast<int>(sends_.size()), sends_.data(), &count, completed_.data(),
         MPI_STATUSES_IGNORE);
  if (count == MPI_UNDEFINED || count == 0) return {};
  for (int i = 0; i < count; ++i) GW_RETURN_IF_ERROR(note_life(sending_[completed_[i]].peer));
  size_t kept = 0;
  for (size_t i = 0; i < sends_.size(); ++i) {
    if (sends_[i] == MPI_REQUEST_NULL) continue;
    sends_[kept] = sends_[i];
    if (kept != i) sending_[kept] = std::move(sending_[i]);
    ++kept;
  }
  sends_.resize(kept);
  sending_.resize(kept);
  return {};
}

bool Wire::sends_pending() const noexcept {
  return std::ranges::any_of(sending_, [](const Sending& s) { return !s.keep; });
}

bool Wire::sends_pending_to(uint32_t peer) const noexcept {
  return std::ranges::any_of(sending_, [=](const Sending& s) { return s.peer == peer; });
}

Status Wire::note_life(uint32_t peer) {
  peers_[peer].silent_seconds = 0;
  const bool waits_no_more = sent_awaiting_ != kNobody && (any_ || sent_awaiting_ == peer);
  return waits_no_more ? send_awaiting(kNobody) : Status();
}

Result<bool> Wire::advance(uint32_t rank, uint64_t max_size, bool& whole) {
  Peer& peer = peers_[rank];
  whole = false;
  MPI_Status status;
  int present = 0;
  int size = 0;
  if (peer.request == MPI_REQUEST_NULL) {
    MPI_Message message = MPI_MESSAGE_NULL;
    GW_MPI(MPI_Improbe, static_cast<int>(rank), tag_, communicator_.handle(), &present, &message,
           &status);
    if (present == 0) return false;
    MPI_Get_count(&status, MPI_BYTE, &size);
    if (peer.used + size > max_size) {
      return Status(StatusCode::kLimitExceeded,
                    "rank " + std::to_string(rank) + " sent rank " +
                        std::to_string(communicator_.rank()) + " a message of at least " +
                        std::to_string(peer.used + size) +
                        " bytes; no message here has more than " + std::to_string(max_size));
    }
    peer.bytes.resize(std::max<uint64_t>(peer.bytes.size(), peer.used + size));
    GW_MPI(MPI_Imrecv, peer.bytes.data() + peer.used, size, MPI_BYTE, &message, &peer.request);
  }
  GW_MPI(MPI_Test, &peer.request, &present, &status);
  if (present == 0) return false;
  MPI_Get_count(&status, MPI_BYTE, &size);
  peer.used += size;
  bytes_received_ += size;
  whole = static_cast<uint64_t>(size) < kPieceBytes;
  GW_RETURN_IF_ERROR(note_life(rank));
  return true;
}

Result<bool> Wire::poll(const Peers& peers, const OnMessage& on_message) {
  any_ = peers.any;
  GW_RETURN_IF_ERROR(complete_sends());
  bool any = false;
  for (uint32_t rank : peers.listening.empty() ? peers.awaited : peers.listening) {
    if (rank >= communicator_.size()) return no_such_rank(rank, communicator_);
    bool whole = false;
    GW_ASSIGN_OR_RETURN(const bool came, advance(rank, peers.max_size, whole));
    any |= came;
    if (!whole) continue;
    Peer& peer = peers_[rank];
    const uint64_t size = std::exchange(peer.used, 0);
    ++peer.messages_received;
    GW_RETURN_IF_ERROR(on_message(rank, std::span(peer.bytes).first(size)));
    return true;  // other ranks may be awaited now
  }
  GW_RETURN_IF_ERROR(watch(peers));
  return any;
}

Status Wire::watch(const Peers& peers) {
  const auto now = std::chrono::steady_clock::now();
  const double gap = std::min(std::chrono::duration<double>(now - last_poll_).count(), kLongestGap);
  last_poll_ = now;
  std::vector<bool> due(peers_.size());  // the ranks without which this rank can't continue
  for (uint32_t peer : peers.awaited) due[peer] = true;
  for (const Sending& sending : sending_) {
    if (!sending.keep || peers.flushing) due[sending.peer] = true;
  }
  std::vector<uint32_t> slow;
  std::vector<uint32_t> silent;
  for (uint32_t peer = 0; peer < peers_.size(); ++peer) {
    double& seconds = peers_[peer].silent_seconds;
    seconds = due[peer] ? seconds + gap : 0;
    if (seconds > timeout_ / 2) slow.push_back(peer);
    if (seconds > timeout_) silent.push_back(peer);
  }
  // A rank that waits for any of several ranks can continue as long as one of them isn't silent.
  const ptrdiff_t enough = peers.any ? std::ranges::count(due, true) : 1;
  if (!slow.empty() && std::ssize(slow) >= enough && sent_awaiting_ == kNobody) {
    GW_RETURN_IF_ERROR(send_awaiting(slow.front()));
  }
  return silent.empty() || std::ssize(silent) < enough ? Status() : name_lost(silent);
}

Status Wire::name_lost(const std::vector<uint32_t>& silent) {
  GW_RETURN_IF_ERROR(receive_notices());
  std::vector<uint32_t> lost;
  for (uint32_t peer : silent) {
    const uint32_t end = find_silent(peer);
    if (std::find(lost.begin(), lost.end(), end) == lost.end()) lost.push_back(end);
  }
  std::string names;
  for (uint32_t peer : lost) names += (names.empty() ? "" : ", ") + std::to_string(peer);
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", timeout_);
  return {StatusCode::kPeerLost, (lost.size() == 1 ? "rank " : "ranks ") + names +
                                     (lost.size() == 1 ? " was" : " were") + " silent for " +
                                     seconds + " s (seen by rank " +
                                     std::to_string(communicator_.rank()) + ")"};
}

Status Wire::send_notice(uint32_t peer, Notice notice, uint32_t awaiting) {
  auto message =
      std::make_unique<NoticeMessage>(NoticeMessage{.rank = communicator_.rank(),
                                                    .awaiting = awaiting,
                                                    .messages = peers_[peer].messages_sent,
                                                    .notice = notice});
  MPI_Request request = MPI_REQUEST_NULL;
  GW_MPI(MPI_Isend, message.get(), sizeof *message, MPI_BYTE, static_cast<int>(peer), tag_ + 1,
         communicator_.handle(), &request);
  notices_.emplace_back(std::move(message), request);
  return {};
}

Status Wire::send_awaiting(uint32_t awaiting) {
  sent_awaiting_ = awaiting;
  for (uint32_t peer = 0; peer < communicator_.size(); ++peer) {
    if (peer == communicator_.rank()) continue;
    GW_RETURN_IF_ERROR(send_notice(peer, Notice::kAwaits, awaiting));
  }
  return {};
}

Status Wire::receive_notices() {
  for (;;) {
    int present = 0;
    GW_MPI(MPI_Iprobe, MPI_ANY_SOURCE, tag_ + 1, communicator_.handle(), &present,
           MPI_STATUS_IGNORE);
    if (present == 0) return {};
    NoticeMessage message = {};
    GW_MPI(MPI_Recv, &message, sizeof message, MPI_BYTE, MPI_ANY_SOURCE, tag_ + 1,
           communicator_.handle(), MPI_STATUS_IGNORE);
    if (message.rank >= peers_.size()) continue;
    Peer& peer = peers_[message.rank];
    if (message.notice == Notice::kAwaits) peer.awaiting = message.awaiting;
    if (message.notice == Notice::kOver) peer.over = message.messages;
    if (message.notice == Notice::kLeft) peer.left = message.messages;
  }
}

bool Wire::heard(uint32_t peer, Notice notice) const {
  if (peer >= peers_.size()) return false;
  const std::optional<uint64_t>& before =
      notice == Notice::kOver ? peers_[peer].over : peers_[peer].left;
  return before && peers_[peer].messages_received >= *before;
}

uint32_t Wire::find_silent(uint32_t awaiting) const {
  uint32_t end = awaiting;
  for (uint32_t hops = 0; hops < communicator_.size(); ++hops) {
    const uint32_t next = peers_[end].awaiting;
    if (next >= peers_.size() || next == communicator_.rank()) return end;
    end = next;
  }
  return awaiting;  // they wait for each other
}

bool Wire::in_use() const noexcept {
  return !sends_.empty() || !notices_.empty() ||
         std::ranges::any_of(peers_, [](const Peer& p) { return p.request != MPI_REQUEST_NULL; });
}

}  // namespace gradwire::mpi
