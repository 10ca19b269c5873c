#include "cuda/shards/shard_batch.h"

#include <algorithm>
#include <map>

#include "base/return_if_error.h"

namespace gradwire::cuda {

Result<BucketCodec> create_bucket_codec(const std::string& text,
                                        const std::vector<BucketSegment>& segments) {
  GW_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> codec, Codec::parse(text));
  return BucketCodec::create(std::move(codec), segments);
}

Result<ShardBatch> ShardBatch::create(const Shards& shards, const std::vector<Shard>& these) {
  ShardBatch batch;
  std::map<std::string, std::vector<size_t>> slots_of_codec;
  for (const auto& [shard, direction] : these) {
    for (uint32_t frame = 0; frame < shards.segments[shard].size(); ++frame) {
      const uint32_t i = shards.segments[shard][frame];
      slots_of_codec[shards.codec(i, direction)->text()].push_back(batch.slots_.size());
      batch.slots_.push_back({.shard = shard, .segment = i, .frame = frame});
    }
  }
  uint32_t first = 0;
  for (const auto& [text, slots] : slots_of_codec) {
    std::vector<BucketSegment> segments;
    for (size_t slot : slots) {
      const uint32_t i = batch.slots_[slot].segment;
      segments.push_back({.offset = shards.segment(i).bucket_offset,
                          .n = shards.segment(i).n,
                          .stream = shards.draw_streams[i]});
    }
    GW_ASSIGN_OR_RETURN(BucketCodec codec, create_bucket_codec(text, segments));
    for (size_t k = 0; k < slots.size(); ++k) {
      Slot& slot = batch.slots_[slots[k]];
      slot.part = static_cast<uint32_t>(batch.parts_.size());
      slot.index = first + static_cast<uint32_t>(k);
      slot.payload_begin = batch.payloads_size_ + codec.payload_offset(k);
    }
    DeviceMemory table;
    const std::span<const std::byte> on_host = codec.table();
    GW_RETURN_IF_ERROR(table.reserve(on_host.size()));
    GW_RETURN_IF_ERROR(to_status(
        cudaMemcpy(table.data(), on_host.data(), on_host.size(), cudaMemcpyHostToDevice)));
    const uint64_t payloads_size = codec.payloads_size();
    batch.parts_.push_back({.codec = std::move(codec),
                            .table = std::move(table),
                            .payloads_begin = batch.payloads_size_,
                            .first = first,
                            .count = static_cast<uint32_t>(slots.size())});
    batch.payloads_size_ += payloads_size;
    first += static_cast<uint32_t>(slots.size());
  }
  return batch;
}

uint64_t ShardBatch::scratch_size(uint32_t sources) const {
  uint64_t size = 0;
  for (const Part& part : parts_) {
    size = std::max({size, part.codec.encode_scratch_size(),
                     sources > 0 ? part.codec.decode_scratch_size(sources) : 0});
  }
  return size;
}

}  // namespace gradwire::cuda
