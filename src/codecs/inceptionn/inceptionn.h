#pragma once

#include <cstdint>

#include "stages/float_clip/float_clip.h"

namespace gradwire {

struct InceptionnParameters {
  static constexpr int kBounds[] = {10, 8, 6};

  uint16_t bound = 0;  // index of kBounds: 2^-10, 2^-8, 2^-6
  ClipMode mode = ClipMode::kPaper;

  // The limits that the tags depend on.
  [[nodiscard]] FloatClip clip() const { return float_clip(kBounds[bound], mode); }
};

}  // namespace gradwire
