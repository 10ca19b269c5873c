#include "gradwire/exchange.h"

namespace gradwire {
namespace {

std::string_view take_line(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return line;
}

}  // namespace

Status Exchange::check_peer(uint32_t peer, std::string_view description) const {
  const std::string own = describe();
  std::string_view mine = own;
  std::string_view theirs = description;
  while (!mine.empty() || !theirs.empty()) {
    const std::string my_line(mine.empty() ? "nothing" : take_line(mine));
    const std::string their_line(theirs.empty() ? "nothing" : take_line(theirs));
    if (my_line == their_line) continue;
    return {StatusCode::kPeerMismatch,
            "ranks " + std::to_string(rank()) + " and " + std::to_string(peer) +
                " can't exchange: rank " + std::to_string(rank()) + " has '" + my_line +
                "', rank " + std::to_string(peer) + " has '" + their_line + "'"};
  }
  return {};
}

}  // namespace gradwire
