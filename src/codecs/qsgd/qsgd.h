#pragma once

#include <cstdint>
#include <optional>

#include "base/private_export.h"
#include "codecs/qsgd/qsgd_shape.h"
#include "gradwire/codec.h"

namespace gradwire {

enum class Norm : uint8_t { kMax = 0, kL2 = 1 };

struct QsgdParameters {
  int32_t levels = 7;  // s
  LevelCoder coder = LevelCoder::kFixed;
  Norm norm = Norm::kMax;  // the encoder's business alone
  uint32_t bucket = 512;
};

// Of a codec qsgd; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<QsgdParameters> qsgd_parameters(const Codec& codec);

}  // namespace gradwire
