#pragma once

#include <optional>

#include "base/private_export.h"
#include "codecs/ternary.h"
#include "gradwire/codec.h"

namespace gradwire {

struct StcParameters {
  float density = 0.01f;  // share of the values that is sent, about; the encoder's business alone
  TernaryCoder coder = TernaryCoder::kRice;
};

// Of a codec stc; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<StcParameters> stc_parameters(const Codec& codec);

}  // namespace gradwire
