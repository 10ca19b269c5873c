#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/checksum.h"

// Offsets and sizes of a packet's parts (spec/format.md).
namespace gradwire::packet_layout {

inline constexpr std::byte kMagic[2] = {std::byte{'G'}, std::byte{'P'}};
inline constexpr uint8_t kVersion = 1;
inline constexpr uint8_t kNonFiniteFlag = 1;

inline constexpr size_t kVersionAt = 2;
inline constexpr size_t kFlagsAt = 3;
inline constexpr size_t kDirectionAt = 4;
inline constexpr size_t kCodecCountAt = 5;
inline constexpr size_t kSourceAt = 6;
inline constexpr size_t kStepAt = 8;
inline constexpr size_t kDigestAt = 16;
inline constexpr size_t kFrameCountAt = 24;
inline constexpr size_t kChecksumAt = 28;
inline constexpr size_t kBodyAt = 32;

inline constexpr size_t kCodecEntrySize = 8;
inline constexpr size_t kSmallestFrameEntry = 3;
inline constexpr size_t kOriginSize = 16;

inline uint32_t checksum_of(std::span<const std::byte> packet) {
  return checksum32(packet.first(kChecksumAt), packet.subspan(kBodyAt));
}

}  // namespace gradwire::packet_layout
