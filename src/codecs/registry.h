#pragma once

#include <memory>

#include "base/private_export.h"
#include "codecs/parameters.h"
#include "gradwire/codec.h"

namespace gradwire {

// What a codec's folder contributes. Codecs are listed in codecs.def, not self-registered: a static
// library would drop a registration that nobody refers to.
struct CodecEntry {
  const CodecInfo* info;
  Result<std::shared_ptr<const Codec>> (*create)(const Parameters& parameters,
                                                 ResidualType residual_type);
  Result<std::shared_ptr<const Codec>> (*from_wire)(const WireCodec& wire, Dtype dtype);
};

namespace codec_entries {
#define GW_CODEC(symbol) extern GW_PRIVATE_EXPORT const CodecEntry symbol;
#include "codecs/codecs.def"
#undef GW_CODEC
}  // namespace codec_entries

}  // namespace gradwire
