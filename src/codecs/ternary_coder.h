#pragma once

#include <cstdint>
#include <string_view>

namespace gradwire {

// How trits become bytes. Headers hold these numbers.
enum class TernaryCoder : uint8_t {
  kNone = 0,     // five to a byte
  kZeroRun = 1,  // as kNone, with runs of zero bytes shortened
  kRice = 2,     // gaps between non-zeros in Golomb-Rice code
  kTwoBit = 3,   // four to a byte
};

// The values of the key `coder`.
inline constexpr std::string_view kTernaryCoders[] = {"none", "zre", "rice"};

}  // namespace gradwire
