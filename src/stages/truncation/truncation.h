#pragma once

#include <cstddef>

namespace gradwire {

// Where two bits of a value lie beside its upper byte, so many values share a byte, the first in
// its lowest bits.
inline constexpr size_t kLowFields = 4;

}  // namespace gradwire
