#pragma once

#include <cstdint>

namespace gradwire {

// The direction of a packet: a push goes to the rank that sums a shard, a pull brings the result
// back. The numbers are those of packets (spec/format.md).
enum class Direction : uint8_t { kPush = 0, kPull = 1 };

[[nodiscard]] constexpr const char* direction_name(Direction direction) noexcept {
  return direction == Direction::kPush ? "push" : "pull";
}

}  // namespace gradwire
