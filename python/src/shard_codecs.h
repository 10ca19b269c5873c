#pragma once

#include "exchange/shards/shard_codec.h"

namespace gradwire::python {

// Makes the shard codecs of an exchange. gradwire._cuda makes objects of this class; gradwire._core
// binds it and takes them, because both modules share one nanobind.
struct ShardCodecs {
  ShardCodecFactory make;
};

}  // namespace gradwire::python
