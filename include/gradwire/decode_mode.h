#pragma once

#include <cstdint>

namespace gradwire {

// What a decoder does with the values that it decodes: stores them, or adds them to what is there.
enum class DecodeMode : uint8_t { kStore, kAdd };

}  // namespace gradwire
