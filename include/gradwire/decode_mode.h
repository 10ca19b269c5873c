#pragma once

#include <cstdint>

namespace gradwire {

// Whether a decoder stores the decoded values or adds them to the values in memory.
enum class DecodeMode : uint8_t { kStore, kAdd };

}  // namespace gradwire
