#pragma once

#include <optional>

#include "base/private_export.h"
#include "gradwire/codec.h"

namespace gradwire {

struct RawParameters {
  Dtype dtype = Dtype::kFloat32;  // of the values in payloads that are decoded
};

// Of a codec raw; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<RawParameters> raw_parameters(const Codec& codec);

}  // namespace gradwire
