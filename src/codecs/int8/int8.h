#pragma once

#include <cstdint>
#include <optional>

#include "base/private_export.h"
#include "gradwire/codec.h"

namespace gradwire {

struct Int8Parameters {
  uint32_t bucket = 0;  // values that share a unit; 0: the whole segment
};

// Of a codec int8; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<Int8Parameters> int8_parameters(const Codec& codec);

}  // namespace gradwire
