#include "engines/mpi/wire.h"

#include <algorithm>
#include <cstdio>
#include <string>

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
      heard_(communicator.size()) {}

Status Wire::send(uint32_t peer, std::span<const std::byte> bytes) {
  if (peer >= communicator_.size()) return no_such_rank(peer, communicator_);
  bytes_sent_ += bytes.size();
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
    send_peers_.push_back(peer);
  }
  return {};
}

Status Wire::complete_sends() {
  if (sends_.empty()) return {};
  completed_.resize(sends_.size());
  int count = 0;
  GW_RETURN_IF_ERROR(check_mpi(MPI_Testsome(static_cast<int>(sends_.size()), sends_.data(), &count,
                                            completed_.data(), MPI_STATUSES_IGNORE),
                               "MPI_Testsome"));
  if (count == MPI_UNDEFINED || count == 0) return {};
  for (int i = 0; i < count; ++i) incoming_[send_peers_[completed_[i]]].silent_seconds = 0;
  size_t kept = 0;
  for (size_t i = 0; i < sends_.size(); ++i) {
    if (sends_[i] == MPI_REQUEST_NULL) continue;
    sends_[kept] = sends_[i];
    send_peers_[kept++] = send_peers_[i];
  }
  sends_.resize(kept);
  send_peers_.resize(kept);
  return {};
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
  incoming.silent_seconds = 0;
  bytes_received_ += size;
  whole = static_cast<uint64_t>(size) < kPieceBytes;
  return true;
}

Result<bool> Wire::poll(std::span<const uint32_t> awaited, uint64_t round,
                        const OnMessage& on_message) {
  GW_RETURN_IF_ERROR(complete_sends());
  bool any = false;
  for (uint32_t peer : awaited) {
    if (peer >= communicator_.size()) return no_such_rank(peer, communicator_);
    Incoming& incoming = incoming_[peer];
    bool whole = false;
    Result<bool> came = advance(incoming, peer, whole);
    if (!came.ok()) return came;
    any |= came.value();
    if (!whole) continue;
    const uint64_t size = incoming.used;
    incoming.used = 0;
    GW_RETURN_IF_ERROR(on_message(peer, std::span(incoming.bytes).first(size)));
    return true;  // who is awaited may be another now
  }
  GW_RETURN_IF_ERROR(watch(awaited, round));
  return any;
}

Status Wire::watch(std::span<const uint32_t> awaited, uint64_t round) {
  const auto now = std::chrono::steady_clock::now();
  const double gap = std::min(std::chrono::duration<double>(now - last_poll_).count(), kLongestGap);
  last_poll_ = now;
  std::vector<uint32_t> due(awaited.begin(), awaited.end());
  due.insert(due.end(), send_peers_.begin(), send_peers_.end());
  std::sort(due.begin(), due.end());
  due.erase(std::unique(due.begin(), due.end()), due.end());
  std::vector<uint32_t> silent;
  for (uint32_t peer = 0; peer < incoming_.size(); ++peer) {
    double& seconds = incoming_[peer].silent_seconds;
    seconds = std::binary_search(due.begin(), due.end(), peer) ? seconds + gap : 0;
    if (seconds > timeout_) silent.push_back(peer);
    if (seconds > timeout_ / 2 && told_round_ != round) {
      GW_RETURN_IF_ERROR(tell_waiting(peer, round));
    }
  }
  if (silent.empty()) return {};
  std::vector<uint32_t> lost;
  for (uint32_t peer : silent) {
    Result<uint32_t> end = find_silent(peer, round);
    if (!end.ok()) return end.status();
    if (std::find(lost.begin(), lost.end(), end.value()) == lost.end()) lost.push_back(end.value());
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

Status Wire::tell_waiting(uint32_t awaiting, uint64_t round) {
  told_round_ = round;
  for (uint32_t peer = 0; peer < communicator_.size(); ++peer) {
    if (peer == communicator_.rank()) continue;
    told_.push_back(std::make_unique<Waiting>(
        Waiting{.round = round, .rank = communicator_.rank(), .awaiting = awaiting}));
    MPI_Request request = MPI_REQUEST_NULL;
    GW_RETURN_IF_ERROR(
        check_mpi(MPI_Isend(told_.back().get(), sizeof(Waiting), MPI_BYTE, static_cast<int>(peer),
                            tag_ + 1, communicator_.handle(), &request),
                  "MPI_Isend"));
    // Some bytes, which MPI takes at once; a rank that is gone must not hold up the others.
    MPI_Request_free(&request);
  }
  return {};
}

Result<uint32_t> Wire::find_silent(uint32_t awaiting, uint64_t round) {
  for (;;) {
    int there = 0;
    GW_RETURN_IF_ERROR(check_mpi(
        MPI_Iprobe(MPI_ANY_SOURCE, tag_ + 1, communicator_.handle(), &there, MPI_STATUS_IGNORE),
        "MPI_Iprobe"));
    if (there == 0) break;
    Waiting waiting = {};
    GW_RETURN_IF_ERROR(check_mpi(MPI_Recv(&waiting, sizeof waiting, MPI_BYTE, MPI_ANY_SOURCE,
                                          tag_ + 1, communicator_.handle(), MPI_STATUS_IGNORE),
                                 "MPI_Recv"));
    if (waiting.rank < heard_.size() && waiting.awaiting < heard_.size()) {
      heard_[waiting.rank] = waiting;
    }
  }
  uint32_t end = awaiting;
  for (uint32_t hops = 0; hops < communicator_.size(); ++hops) {
    const std::optional<Waiting>& waiting = heard_[end];
    const bool holds = waiting && waiting->round == round;
    if (!holds || waiting->awaiting == communicator_.rank()) return end;
    end = waiting->awaiting;
  }
  return awaiting;  // they wait for each other
}

bool Wire::in_use() const noexcept {
  return !sends_.empty() || !told_.empty() ||
         std::any_of(incoming_.begin(), incoming_.end(),
                     [](const Incoming& i) { return i.request != MPI_REQUEST_NULL; });
}

}  // namespace gradwire::mpi
