#pragma once

#include <optional>

#include "gradwire/codec.h"

namespace gradwire {

struct RawParameters {
  Dtype dtype = Dtype::kFloat32;  // of the values in payloads that are decoded
};

// Of a codec raw; nothing for others.
[[nodiscard]] std::optional<RawParameters> raw_parameters(const Codec& codec);

}  // namespace gradwire
