#pragma once

#include <cstdint>
#include <string>

#include "gradwire/mpi.h"

namespace gradwire::mpi {

// What the preload library compresses, and how.
struct PreloadConfig {
  Options options = {.codec = ""};
  uint64_t min_bytes = 1 << 20;  // smaller buffers are left alone
};

// Lines `key = value`; # begins a comment. Keys: codec (which must be there), pull-codec, exchange
// (as ExchangeChoice::parse takes it), min-bytes, threads, seed, timeout. kInvalidArgument with
// path and line where it can't be read, a key is unknown or a value won't do; the codecs' own
// statuses.
Result<PreloadConfig> read_preload_config(const std::string& path);

}  // namespace gradwire::mpi
