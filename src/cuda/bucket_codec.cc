#include <cstring>
#include <string>
#include <utility>

#include "codecs/chunks.h"
#include "codecs/groups.h"
#include "codecs/registry.h"
#include "cuda/common/codec_kernels.h"
#include "cuda/common/segments.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {
namespace {

// Payloads begin at multiples of this, counted from payloads_dev.
constexpr uint64_t kPayloadAlignment = 16;
// One or several blocks handle each chunk, and a launch has at most 2^31 - 1 blocks.
constexpr uint64_t kMostChunks = INT32_MAX;

struct Line {
  const CodecEntry* entry;
  KernelsFactory kernels;
};

const Line kLines[] = {
#define GW_KERNELS(symbol) {&codec_entries::symbol, kernel_factories::symbol},
#include "cuda/cuda_kernels.def"
#undef GW_KERNELS
};

Result<std::unique_ptr<const CodecKernels>> kernels_of(const Codec& codec) {
  for (const Line& line : kLines) {
    if (line.entry->info->id == codec.info().id) return line.kernels(codec);
  }
  return Status(StatusCode::kUnknownCodec,
                "codec " + std::string(codec.info().name) + " has no kernels for the GPU");
}

Segments in_table(const std::byte* table, uint64_t segments, uint64_t chunks, uint64_t scales) {
  const std::byte* chunk_table = table == nullptr ? nullptr : table + segments * sizeof(Segment);
  return {reinterpret_cast<const Segment*>(table), reinterpret_cast<const uint32_t*>(chunk_table),
          static_cast<uint32_t>(segments), static_cast<uint32_t>(chunks),
          static_cast<uint32_t>(scales)};
}

}  // namespace

BucketCodec::BucketCodec() = default;
BucketCodec::BucketCodec(BucketCodec&&) noexcept = default;
BucketCodec& BucketCodec::operator=(BucketCodec&&) noexcept = default;
BucketCodec::~BucketCodec() = default;

Result<BucketCodec> BucketCodec::create(std::shared_ptr<const Codec> codec,
                                        std::span<const BucketSegment> segments) {
  Result<std::unique_ptr<const CodecKernels>> kernels = kernels_of(*codec);
  if (!kernels.ok()) return kernels.status();
  BucketCodec made;
  made.kernels_ = std::move(kernels.value());
  std::vector<Segment> table;
  std::vector<uint32_t> segment_of_chunk;
  uint64_t payload = 0;
  for (const BucketSegment& segment : segments) {
    if (segment.n > kMaxNumel) {
      return Status(StatusCode::kInvalidArgument,
                    "a segment has at most " + std::to_string(kMaxNumel) + " values");
    }
    const Groups groups(segment.n, made.kernels_->group_size());
    const uint64_t chunks = (segment.n + kChunkValues - 1) / kChunkValues;
    if (made.chunks_ + chunks > kMostChunks || made.scales_ + groups.count > UINT32_MAX ||
        segments.size() > UINT32_MAX) {
      return Status(StatusCode::kLimitExceeded,
                    "the bucket has more chunks than 2^31 - 1 or more scales than 2^32 - 1");
    }
    table.push_back({.begin = segment.offset,
                     .n = segment.n,
                     .draw_stream = segment.stream,
                     .payload = payload,
                     .group_size = groups.size,
                     .first_chunk = static_cast<uint32_t>(made.chunks_),
                     .chunks = static_cast<uint32_t>(chunks),
                     .first_scale = static_cast<uint32_t>(made.scales_),
                     .scales = static_cast<uint32_t>(groups.count)});
    segment_of_chunk.resize(segment_of_chunk.size() + chunks,
                            static_cast<uint32_t>(table.size() - 1));
    made.payload_offsets_.push_back(payload);
    const uint64_t largest = codec->max_payload_size(segment.n);
    made.fixed_sizes_ &= segment.n == 0 || !codec->check_size(segment.n, largest - 1).ok();
    payload += (largest + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
    made.chunks_ += chunks;
    made.scales_ += groups.count;
  }
  made.payloads_size_ = payload;
  made.segments_ = segments.size();
  made.table_.resize(table.size() * sizeof(Segment) + segment_of_chunk.size() * sizeof(uint32_t));
  if (!table.empty()) std::memcpy(made.table_.data(), table.data(), table.size() * sizeof(Segment));
  if (!segment_of_chunk.empty()) {
    std::memcpy(made.table_.data() + table.size() * sizeof(Segment), segment_of_chunk.data(),
                segment_of_chunk.size() * sizeof(uint32_t));
  }
  made.codec_ = std::move(codec);
  return made;
}

uint64_t BucketCodec::encode_scratch_size() const noexcept {
  ScratchLayout counted;
  static_cast<void>(
      kernels_->encode(in_table(nullptr, segments_, chunks_, scales_), {}, counted, nullptr));
  return counted.size();
}

uint64_t BucketCodec::decode_scratch_size(uint32_t sources) const noexcept {
  ScratchLayout counted;
  static_cast<void>(kernels_->decode(in_table(nullptr, segments_, chunks_, scales_),
                                     {.sources = sources}, counted, nullptr));
  return counted.size();
}

Status BucketCodec::encode(const EncodeArguments& arguments, cudaStream_t stream) const {
  ScratchLayout scratch(arguments.scratch_dev);
  return kernels_->encode(in_table(arguments.table_dev, segments_, chunks_, scales_), arguments,
                          scratch, stream);
}

Status BucketCodec::decode(const DecodeArguments& arguments, cudaStream_t stream) const {
  if (arguments.sources == 0)
    return {StatusCode::kInvalidArgument, "there are no payloads to decode"};
  ScratchLayout scratch(arguments.scratch_dev);
  return kernels_->decode(in_table(arguments.table_dev, segments_, chunks_, scales_), arguments,
                          scratch, stream);
}

}  // namespace gradwire::cuda
