#pragma once

#include "exchange/shards/shard_codec.h"

namespace gradwire::python {

// What makes the shard codecs of an exchange. gradwire._cuda makes objects of this class, which
// gradwire._core binds and takes: one nanobind serves both modules.
struct ShardCodecs {
  ShardCodecFactory make;
};

}  // namespace gradwire::python
