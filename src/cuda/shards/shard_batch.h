#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/shards/device_memory.h"
#include "exchange/shards/shards.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// By the codec's text, as the codecs of a layout may come from another copy of the library (each of
// Python's modules has one), whose classes this one does not know.
Result<BucketCodec> create_bucket_codec(const std::string& text,
                                        const std::vector<BucketSegment>& segments);

// The segments of some shards, which are encoded or decoded together: one launch handles all
// segments of a codec.
class ShardBatch {
 public:
  using Shard = std::pair<uint32_t, Direction>;  // the direction in which the shard is sent

  // The segments of one codec.
  struct Part {
    BucketCodec codec;
    DeviceMemory table;
    uint64_t payloads_begin;  // in the payloads of the batch
    uint32_t first;           // of its segments, in the batch's numbering by parts
    uint32_t count;
  };
  // A segment of the batch, in the order of the shards and of their segments.
  struct Slot {
    uint32_t shard;
    uint32_t segment;  // of the layout
    uint32_t frame;    // of the shard's packets
    uint32_t part = 0;
    uint32_t index = 0;          // in the numbering by parts
    uint64_t payload_begin = 0;  // where its payload begins if it is encoded
  };

  static Result<ShardBatch> create(const Shards& shards, const std::vector<Shard>& these);

  [[nodiscard]] const std::vector<Part>& parts() const { return parts_; }
  [[nodiscard]] const std::vector<Slot>& slots() const { return slots_; }
  [[nodiscard]] uint64_t payloads_size() const { return payloads_size_; }
  [[nodiscard]] uint64_t scratch_size(uint32_t sources) const;

 private:
  std::vector<Part> parts_;
  std::vector<Slot> slots_;
  uint64_t payloads_size_ = 0;
};

}  // namespace gradwire::cuda
