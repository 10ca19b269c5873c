#include <algorithm>
#include <string>
#include <utility>

#include "base/return_if_error.h"
#include "codecs/chunked_codec.h"
#include "codecs/raw/raw.h"
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

Result<std::unique_ptr<const CodecKernels>> kernels_of(const Codec& codec) {
  const auto refuse = [](const std::string& name) {
    return Status(StatusCode::kUnknownCodec, "codec " + name + " has no kernels for the GPU");
  };
#define GW_KERNELS(symbol)                                                            \
  if (codec_entries::symbol.info->id == codec.info().id) {                            \
    std::unique_ptr<const CodecKernels> kernels = kernel_factories::symbol(codec);    \
    if (kernels == nullptr) return refuse(codec.text() + ", with these parameters,"); \
    return Result<std::unique_ptr<const CodecKernels>>(std::move(kernels));           \
  }
#include "cuda/cuda_kernels.def"
#undef GW_KERNELS
  return refuse(std::string(codec.info().name));
}

// The parts of a payload, and how its values share scales, as on the CPU.
ChunkedShape shape_of(const Codec& codec, uint64_t n) {
  if (const ChunkedCodec* chunked = as_chunked(codec)) return chunked->shape(n);
  const uint64_t width = size_of(parameters_of<RawParameters>(codec)->dtype);
  return {Groups(n, 0), 0, [width](uint64_t values) { return values * width; }};
}

// The smallest size of a payload that is not empty; all sizes up to `largest` are valid.
uint64_t least_size(const Codec& codec, uint64_t n, uint64_t largest) {
  uint64_t least = 1;
  for (uint64_t valid = std::max<uint64_t>(largest, 1); least < valid;) {
    const uint64_t middle = least + (valid - least) / 2;
    if (codec.check_size(n, middle).ok()) {
      valid = middle;
    } else {
      least = middle + 1;
    }
  }
  return least;
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
  BucketCodec made;
  GW_ASSIGN_OR_RETURN(made.kernels_, kernels_of(*codec));
  std::vector<Segment> table;
  std::vector<uint32_t> segment_of_chunk;
  uint64_t payload = 0;
  for (const BucketSegment& segment : segments) {
    if (segment.n > kMaxNumel) {
      return Status(StatusCode::kInvalidArgument,
                    "a segment has at most " + std::to_string(kMaxNumel) + " values");
    }
    const ChunkedShape shape = shape_of(*codec, segment.n);
    const ChunkShape& chunks = shape.chunks;
    if (made.chunks_ + chunks.chunks > kMostChunks ||
        made.scales_ + shape.groups.count > UINT32_MAX || segments.size() > UINT32_MAX) {
      return Status(StatusCode::kLimitExceeded,
                    "the bucket has more chunks than 2^31 - 1 or more scales than 2^32 - 1");
    }
    const uint64_t largest = shape.max_size();
    const uint64_t least = least_size(*codec, segment.n, largest);
    table.push_back({.begin = segment.offset,
                     .n = segment.n,
                     .draw_stream = segment.stream,
                     .group_size = shape.groups.size,
                     .first_chunk = static_cast<uint32_t>(made.chunks_),
                     .chunks = static_cast<uint32_t>(chunks.chunks),
                     .first_scale = static_cast<uint32_t>(made.scales_),
                     .scales = static_cast<uint32_t>(shape.groups.count),
                     .payload = payload,
                     .least_size = least,
                     .largest_size = largest,
                     .scales_size = shape.heads_size(),
                     .size_width = static_cast<uint32_t>(chunks.size_width),
                     .full_room = static_cast<uint32_t>(chunks.full_room),
                     .last_room = static_cast<uint32_t>(chunks.last_room),
                     .may_be_empty = codec->check_size(segment.n, 0).ok()});
    segment_of_chunk.resize(segment_of_chunk.size() + chunks.chunks,
                            static_cast<uint32_t>(table.size() - 1));
    made.payload_offsets_.push_back(payload);
    made.fixed_sizes_ &= segment.n == 0 || least == largest;
    const uint64_t room = codec->max_payload_size(segment.n);  // raw encodes 16-bit values, too
    payload += (room + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
    made.chunks_ += chunks.chunks;
    made.scales_ += shape.groups.count;
  }
  made.payloads_size_ = payload;
  made.segments_ = segments.size();
  for (const auto part :
       {std::as_bytes(std::span(table)), std::as_bytes(std::span(segment_of_chunk))}) {
    made.table_.insert(made.table_.end(), part.begin(), part.end());
  }
  made.codec_ = std::move(codec);
  return Result<BucketCodec>(std::move(made));
}

uint64_t BucketCodec::encode_scratch_size() const noexcept {
  Call counted(in_table(nullptr, segments_, chunks_, scales_));
  kernels_->encode(counted, {});
  return counted.scratch_size();
}

uint64_t BucketCodec::decode_scratch_size(uint32_t sources) const noexcept {
  Call counted(in_table(nullptr, segments_, chunks_, scales_));
  kernels_->decode(counted, {.sources = sources});
  return counted.scratch_size();
}

Status BucketCodec::encode(const EncodeArguments& arguments, cudaStream_t stream) const {
  Call call(in_table(arguments.table_dev, segments_, chunks_, scales_), arguments.scratch_dev,
            stream);
  kernels_->encode(call, arguments);
  return call.status();
}

Status BucketCodec::decode(const DecodeArguments& arguments, cudaStream_t stream) const {
  if (arguments.sources == 0)
    return {StatusCode::kInvalidArgument, "there are no payloads to decode"};
  Call call(in_table(arguments.table_dev, segments_, chunks_, scales_), arguments.scratch_dev,
            stream);
  kernels_->decode(call, arguments);
  return call.status();
}

}  // namespace gradwire::cuda
