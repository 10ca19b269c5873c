#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire {

// XXH3-64 (seed 0) of the bytes and then of `more`, as if they were one span.
[[nodiscard]] uint64_t digest64(std::span<const std::byte> bytes,
                                std::span<const std::byte> more) noexcept;

// The checksum field of frames and packets (spec/format.md): the low 32 bits of digest64.
[[nodiscard]] uint32_t checksum32(std::span<const std::byte> bytes,
                                  std::span<const std::byte> more) noexcept;

}  // namespace gradwire
