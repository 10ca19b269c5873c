#include "cuda/shards/shard_batch.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/return_if_error.h"

namespace gradwire::cuda {

Result<BucketCodec> create_bucket_codec(const std::string& text,
                                        std::span<const BucketSegment> segments) {
  Result<std::shared_ptr<const Codec>> codec = Codec::parse(text);
  if (!codec.ok()) return codec.status();
  return BucketCodec::create(std::move(codec).value(), segments);
}

Result<ShardBatch> ShardBatch::create(const Shards& shards, std::span<const uint32_t> these,
                                      const CodecOf& codec_of) {
  ShardBatch batch;
  std::map<std::string, std::vector<size_t>> slots_of_codec;
  for (uint32_t shard : these) {
    for (uint32_t frame = 0; frame < shards.segments[shard].size(); ++frame) {
      const uint32_t i = shards.segments[shard][frame];
      slots_of_codec[codec_of(i)->text()].push_back(batch.slots_.size());
      batch.slots_.push_back(
          {.shard = shard, .segment = i, .index = 0, .frame = frame, .payload_begin = 0});
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
    Result<BucketCodec> made = create_bucket_codec(text, segments);
    if (!made.ok()) return made.status();
    const ResidualType residual_type = codec_of(batch.slots_[slots[0]].segment)->residual_type();
    for (size_t k = 0; k < slots.size(); ++k) {
      batch.slots_[slots[k]].index = first + static_cast<uint32_t>(k);
      batch.slots_[slots[k]].payload_begin = batch.payloads_size_ + made.value().payload_offset(k);
    }
    DeviceMemory table;
    const std::span<const std::byte> on_host = made.value().table();
    GW_RETURN_IF_ERROR(table.reserve(on_host.size()));
    GW_RETURN_IF_ERROR(to_status(
        cudaMemcpy(table.data(), on_host.data(), on_host.size(), cudaMemcpyHostToDevice)));
    const uint64_t payloads_size = made.value().payloads_size();
    batch.parts_.push_back({.codec = std::move(made).value(),
                            .table = std::move(table),
                            .residual_type = residual_type,
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
