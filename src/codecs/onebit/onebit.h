#pragma once

#include <cstdint>
#include <optional>

#include "base/private_export.h"
#include "gradwire/codec.h"

namespace gradwire {

struct OneBitParameters {
  uint32_t bucket = 0;  // values that share two means, a multiple of 8; 0: the whole segment
};

// Of a codec onebit; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<OneBitParameters> onebit_parameters(
    const Codec& codec);

}  // namespace gradwire
