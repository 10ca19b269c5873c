#pragma once

#include <optional>

#include "base/private_export.h"
#include "gradwire/codec.h"
#include "stages/float_clip.h"

namespace gradwire {

// What the tags of a codec inceptionn depend on; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<FloatClip> inceptionn_clip(const Codec& codec);

}  // namespace gradwire
