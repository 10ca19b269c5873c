#pragma once

#include "exchange/shards/shard_codec.h"
#include "gradwire/execution.h"

namespace gradwire {

// Makes shard codecs for buckets in the memory of the host. They share the execution, so that one
// thread drives all exchanges that get codecs from here.
[[nodiscard]] ShardCodecFactory host_shard_codecs(Execution execution);

}  // namespace gradwire
