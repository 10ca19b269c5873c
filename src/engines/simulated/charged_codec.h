#pragma once

#include <functional>
#include <memory>
#include <string>

#include "exchange/shards/shard_codec.h"

namespace gradwire {

// Seconds that a codec takes for a value.
struct CodecCost {
  double encode = 0;  // with the residual, if the codec keeps one
  double decode = 0;  // added to a sum, or stored
};

// The cost of the codec of this text, such as "3lc:s=1.75".
using CostOfCodec = std::function<CodecCost(const std::string& codec)>;

// Makes shard codecs that work as those of `codecs`, and add to `*seconds` how long each encoding
// and decoding takes in the simulated world. Everything else (divisions, the search for NaN and
// Inf, the measurement of shared scales) is free. `seconds` must outlive the shard codecs.
[[nodiscard]] ShardCodecFactory charge(ShardCodecFactory codecs, CostOfCodec cost, double* seconds);

}  // namespace gradwire
