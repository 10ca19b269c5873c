#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace gradwire {

// XXH3-64 (seed 0) of the parts in their order, as if they were one span.
[[nodiscard]] uint64_t digest64(std::initializer_list<std::span<const std::byte>> parts) noexcept;

// The checksum field of frames and packets (spec/format.md): the low 32 bits of digest64.
[[nodiscard]] uint32_t checksum32(std::initializer_list<std::span<const std::byte>> parts) noexcept;

}  // namespace gradwire
