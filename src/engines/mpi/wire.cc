#include "engines/mpi/wire.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "base/return_if_error.h"

namespace gradwire::mpi {
namespace {

// A gap between two polls counts no more than this: whoever computes in between hears nobody.
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
      incoming_(communicator.size()),
      messages_sent_(communicator.size()),
      told_by_(communicator.size()) {}

Status Wire::send(uint32_t peer, std::span<const std::byte> bytes,
                  const std::shared_ptr<const void>& keep) {
  if (peer >= communicator_.size()) return no_such_rank(peer, communicator_);
  bytes_sent_ += bytes.size();
  ++messages_sent_[peer];
  for (bool last = false; !last;) {
    const std::span<const std::byte> piece =
        bytes.first(std::min<uint64_t>(bytes.size(), kPieceBytes));
    bytes = bytes.subspan(piece.size());
    last = piece.size() < kPieceBytes;
    MPI_Request request = MPI_REQUEST_NULL;
    GW_RETURN_IF_ERROR(
        check_mpi(MPI_Isend(piece.data(), static_cast<int>(piece.size()), MPI_BYTE,
                            static_cast<int>(peer), tag_, communicator_.handle(), &request),
                  "MPI_Isend"));
    sends_.push_back(request);
    sending_.push_back({.peer = peer, .keep = keep});
  }
  return {};
}

Status Wire::complete_sends() {
  std::erase_if(words_, [](std::pair<std::unique_ptr<Word>, MPI_Request>& word) {
    int sent = 0;
    MPI_Test(&word.second, &sent, MPI_STATUS_IGNORE);
    return sent != 0;
  });
  if (sends_.empty()) return {};
  completed_.resize(sends_.size());
  int count = 0;
  GW_RETURN_IF_ERROR(check_mpi(MPI_Testsome(static_cast<int>(sends_.size()), sends_.data(), &count,
                                            completed_.data(), MPI_STATUSES_IGNORE),
                               "MPI_Testsome"));
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
  return std::any_of(sending_.begin(), sending_.end(), [](const Sending& s) { return !s.keep; });
}

Status Wire::note_life(uint32_t peer) {
  incoming_[peer].silent_seconds = 0;
  const bool waits_no_more = told_awaiting_ != kNobody && (any_ || told_awaiting_ == peer);
  return waits_no_more ? tell_waiting(kNobody) : Status();
}

// Whether anything of the peer's came; whole: and that was the rest of a message.
Result<bool> Wire::advance(Incoming& incoming, uint32_t peer, bool& whole) {
  whole = false;
  MPI_Status status;
  int there = 0;
  if (incoming.request == MPI_REQUEST_NULL) {
    MPI_Message message = MPI_MESSAGE_NULL;
    GW_RETURN_IF_ERROR(check_mpi(MPI_Improbe(static_cast<int>(peer), tag_, communicator_.handle(),
                                             &there, &message, &status),
                                 "MPI_Improbe"));
    if (there == 0) return false;
    int size = 0;
    MPI_Get_count(&status, MPI_BYTE, &size);
    incoming.bytes.resize(std::max<uint64_t>(incoming.bytes.size(), incoming.used + size));
    GW_RETURN_IF_ERROR(check_mpi(MPI_Imrecv(incoming.bytes.data() + incoming.used, size, MPI_BYTE,
                                            &message, &incoming.request),
                                 "MPI_Imrecv"));
  }
  GW_RETURN_IF_ERROR(check_mpi(MPI_Test(&incoming.request, &there, &status), "MPI_Test"));
  if (there == 0) return false;
  int size = 0;
  MPI_Get_count(&status, MPI_BYTE, &size);
  incoming.used += size;
  bytes_received_ += size;
  whole = static_cast<uint64_t>(size) < kPieceBytes;
  GW_RETURN_IF_ERROR(note_life(peer));
  return true;
}

Result<bool> Wire::poll(const Peers& peers, const OnMessage& on_message) {
  any_ = peers.any;
  GW_RETURN_IF_ERROR(complete_sends());
  bool any = false;
  for (uint32_t peer : peers.listening.empty() ? peers.awaited : peers.listening) {
    if (peer >= communicator_.size()) return no_such_rank(peer, communicator_);
    Incoming& incoming = incoming_[peer];
    bool whole = false;
    Result<bool> came = advance(incoming, peer, whole);
    if (!came.ok()) return came;
    any |= came.value();
    if (!whole) continue;
    const uint64_t size = incoming.used;
    incoming.used = 0;
    ++incoming.messages;
    GW_RETURN_IF_ERROR(on_message(peer, std::span(incoming.bytes).first(size)));
    return true;  // who is awaited may be another now
  }
  GW_RETURN_IF_ERROR(watch(peers));
  return any;
}

// Those without whom this rank can't go on, ascending.
std::vector<uint32_t> Wire::due(const Peers& peers) const {
  std::vector<uint32_t> ranks(peers.awaited.begin(), peers.awaited.end());
  for (const Sending& sending : sending_) {
    if (!sending.keep || peers.flushing) ranks.push_back(sending.peer);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

Status Wire::watch(const Peers& peers) {
  const auto now = std::chrono::steady_clock::now();
  const double gap = std::min(std::chrono::duration<double>(now - last_poll_).count(), kLongestGap);
  last_poll_ = now;
  const std::vector<uint32_t> waited_for = due(peers);
  std::vector<uint32_t> slow;
  std::vector<uint32_t> silent;
  for (uint32_t peer = 0; peer < incoming_.size(); ++peer) {
    double& seconds = incoming_[peer].silent_seconds;
    const bool counts = std::binary_search(waited_for.begin(), waited_for.end(), peer);
    seconds = counts ? seconds + gap : 0;
    if (seconds > timeout_ / 2) slow.push_back(peer);
    if (seconds > timeout_) silent.push_back(peer);
  }
  // With one rank that isn't silent, whoever waits for any of them may still go on.
  const size_t enough = peers.any ? waited_for.size() : 1;
  if (!slow.empty() && slow.size() >= enough && told_awaiting_ == kNobody) {
    GW_RETURN_IF_ERROR(tell_waiting(slow.front()));
  }
  return silent.empty() || silent.size() < enough ? Status() : name_lost(silent);
}

Status Wire::name_lost(const std::vector<uint32_t>& silent) {
  GW_RETURN_IF_ERROR(take_news());
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

Status Wire::send_word(uint32_t peer, News news, uint32_t awaiting) {
  auto word = std::make_unique<Word>(Word{.rank = communicator_.rank(),
                                          .awaiting = awaiting,
                                          .messages = messages_sent_[peer],
                                          .news = news});
  MPI_Request request = MPI_REQUEST_NULL;
  GW_RETURN_IF_ERROR(check_mpi(MPI_Isend(word.get(), sizeof(Word), MPI_BYTE, static_cast<int>(peer),
                                         tag_ + 1, communicator_.handle(), &request),
                               "MPI_Isend"));
  words_.emplace_back(std::move(word), request);
  return {};
}

Status Wire::tell(uint32_t peer, News news) { return send_word(peer, news, kNobody); }

Status Wire::tell_waiting(uint32_t awaiting) {
  told_awaiting_ = awaiting;
  for (uint32_t peer = 0; peer < communicator_.size(); ++peer) {
    if (peer == communicator_.rank()) continue;
    GW_RETURN_IF_ERROR(send_word(peer, News::kAwaits, awaiting));
  }
  return {};
}

Status Wire::take_news() {
  for (;;) {
    int there = 0;
    GW_RETURN_IF_ERROR(check_mpi(
        MPI_Iprobe(MPI_ANY_SOURCE, tag_ + 1, communicator_.handle(), &there, MPI_STATUS_IGNORE),
        "MPI_Iprobe"));
    if (there == 0) return {};
    Word word = {};
    GW_RETURN_IF_ERROR(check_mpi(MPI_Recv(&word, sizeof word, MPI_BYTE, MPI_ANY_SOURCE, tag_ + 1,
                                          communicator_.handle(), MPI_STATUS_IGNORE),
                                 "MPI_Recv"));
    if (word.rank >= told_by_.size()) continue;
    Told& told = told_by_[word.rank];
    if (word.news == News::kAwaits) told.awaiting = word.awaiting;
    if (word.news == News::kOver) told.over = word.messages;
    if (word.news == News::kLeft) told.left = word.messages;
  }
}

bool Wire::heard(uint32_t peer, News news) const {
  const std::optional<uint64_t>& before =
      news == News::kOver ? told_by_[peer].over : told_by_[peer].left;
  return before && incoming_[peer].messages >= *before;
}

uint32_t Wire::find_silent(uint32_t awaiting) const {
  uint32_t end = awaiting;
  for (uint32_t hops = 0; hops < communicator_.size(); ++hops) {
    const uint32_t next = told_by_[end].awaiting;
    if (next >= told_by_.size() || next == communicator_.rank()) return end;
    end = next;
  }
  return awaiting;  // they wait for each other
}

bool Wire::in_use() const noexcept {
  return !sends_.empty() || !words_.empty() ||
         std::any_of(incoming_.begin(), incoming_.end(),
                     [](const Incoming& i) { return i.request != MPI_REQUEST_NULL; });
}

}  // namespace gradwire::mpi
