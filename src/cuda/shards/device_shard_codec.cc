#include "cuda/shards/device_shard_codec.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/return_if_error.h"
#include "cuda/shards/device_memory.h"
#include "cuda/shards/shard_batch.h"
#include "cuda/shards/shard_values.h"
#include "gradwire/cuda.h"
#include "gradwire/residual.h"

namespace gradwire::cuda {
namespace {

// Payloads with a smaller gap between them are copied to the host together.
constexpr uint64_t kCopiedGap = 16384;
constexpr uint64_t kNone = ~uint64_t{0};

struct Run {
  uint64_t begin;  // in the bucket
  uint64_t n;
};

class DeviceShardCodec final : public ShardCodec {
 public:
  DeviceShardCodec(std::shared_ptr<const Shards> shards, int device, cudaStream_t stream)
      : shards_(std::move(shards)), device_(device), stream_(stream), runs_(shards_->count()) {}

  // Takes the memory of residuals. kUnknownCodec: a codec has no kernels.
  Status prepare();

  void begin(std::span<float> bucket) override { bucket_ = bucket; }
  Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards) override;
  Result<FirstNonFinite> encode(std::span<const uint32_t> shards, std::span<const uint32_t> finite,
                                uint64_t step, std::span<PacketWriter> packets) override;
  void put_back(uint32_t shard, const Packet& packet) override;
  Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                const Next& next) override;
  void divide(uint32_t shard, float divisor) override;
  void fill_nan(uint32_t shard) override;

  ResidualType residual_type(uint32_t i) const override { return residual_types_[i]; }
  std::vector<float> residual(uint32_t i) const override;
  void reset_residual(uint32_t i, ResidualType type) override;
  void add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                       float factor) override;
  void scale_residuals(float factor) override;
  void pay_residual(uint32_t i) override;
  void add_norms(uint32_t shard, const Packet& packet, Norms& norms) override;

 private:
  using Batches = std::map<std::vector<uint32_t>, ShardBatch>;

  [[nodiscard]] const Segment& segment(uint32_t i) const { return shards_->segment(i); }
  [[nodiscard]] float* values(uint32_t i) const {
    return bucket_.data() + segment(i).bucket_offset;
  }
  [[nodiscard]] void* residual_base(ResidualType type) const {
    return type == ResidualType::kNone ? nullptr : residuals_[static_cast<size_t>(type)].data();
  }
  // The residual of segment i from its value `first` on.
  [[nodiscard]] ResidualValues residual_values(uint32_t i, uint64_t first = 0) const;

  // Runs `work` for a function without a Status: keeps the first error for the next function that
  // has one.
  template <typename Work>
  void run(const Work& work);
  // Runs `work` on the device, unless an error was kept.
  template <typename Work>
  auto on_device(const Work& work) -> decltype(work());

  [[nodiscard]] Status wait() const { return to_status(cudaStreamSynchronize(stream_)); }
  [[nodiscard]] Status copy(void* to, const void* from, uint64_t size, cudaMemcpyKind kind) const {
    return size == 0 ? Status() : to_status(cudaMemcpyAsync(to, from, size, kind, stream_));
  }
  // The batch of these shards, each encoded in the direction in which this rank encodes it.
  Result<const ShardBatch*> encoded_batch(std::span<const uint32_t> shards);
  Result<const ShardBatch*> decoded_batch(uint32_t shard, Direction direction);
  static Result<const ShardBatch*> find(Batches& batches, const Shards& shards,
                                        std::span<const uint32_t> these,
                                        const ShardBatch::CodecOf& codec_of);

  Result<FirstNonFinite> find_in(std::span<const uint32_t> shards);
  Result<FirstNonFinite> encode_on_device(std::span<const uint32_t> shards,
                                          std::span<const uint32_t> finite, uint64_t step,
                                          std::span<PacketWriter> packets);
  Status queue_encode(const ShardBatch& batch, uint64_t step);
  Status fetch_payloads(const ShardBatch& batch, const EncodedSegment* encoded);
  Status restore(const ShardBatch& batch, std::span<const EncodedSegment> encoded);
  Status decode_to(float* out, const ShardBatch& batch, std::span<const Packet* const> packets,
                   DecodeMode mode);
  Status decode_sent(uint32_t shard, const Packet& packet);
  Status read_norms(uint32_t shard, const Packet& packet, Norms& norms);

  std::shared_ptr<const Shards> shards_;
  int device_;
  cudaStream_t stream_;
  std::vector<std::vector<Run>> runs_;  // of each shard: contiguous values
  std::span<float> bucket_;             // addresses of the device
  Status failed_;

  std::vector<ResidualType> residual_types_;  // of each segment
  DeviceMemory residuals_[3];                 // by type, each as long as the bucket

  Batches encoded_batches_;
  Batches decoded_batches_[2];  // by direction
  DeviceMemory scratch_;
  DeviceMemory payloads_;  // what was encoded, or came
  DeviceMemory results_;   // that kernels write for the host
  DeviceMemory sent_;      // values that were sent, as long as the bucket
  PinnedMemory payloads_on_host_;
  PinnedMemory results_on_host_;
};

Status DeviceShardCodec::prepare() {
  const CurrentDevice current(device_);
  GW_RETURN_IF_ERROR(current.status());
  for (uint32_t i = 0; i < shards_->layout->segments().size(); ++i) {
    for (Direction direction : {Direction::kPush, Direction::kPull}) {
      const Result<BucketCodec> made =
          create_bucket_codec(shards_->codec(i, direction)->text(), {});
      if (!made.ok()) return made.status();
    }
    residual_types_.push_back(ResidualType::kNone);
    reset_residual(i, shards_->residual_type(i));
    std::vector<Run>& runs = runs_[segment(i).owner];
    const uint64_t begin = segment(i).bucket_offset;
    if (runs.empty() || runs.back().begin + runs.back().n != begin) runs.push_back({begin, 0});
    runs.back().n += segment(i).n;
  }
  const uint64_t results = std::max<uint64_t>(shards_->count() * sizeof(uint64_t),
                                              residual_types_.size() * sizeof(EncodedSegment));
  GW_RETURN_IF_ERROR(results_.reserve(results));
  GW_RETURN_IF_ERROR(results_on_host_.reserve(results));
  return failed_;
}

template <typename Work>
auto DeviceShardCodec::on_device(const Work& work) -> decltype(work()) {
  if (!failed_.ok()) return failed_;
  const CurrentDevice current(device_);
  if (!current.status().ok()) return current.status();
  return work();
}

template <typename Work>
void DeviceShardCodec::run(const Work& work) {
  const Status status = on_device(work);
  if (failed_.ok()) failed_ = status;
}

Result<const ShardBatch*> DeviceShardCodec::find(Batches& batches, const Shards& shards,
                                                 std::span<const uint32_t> these,
                                                 const ShardBatch::CodecOf& codec_of) {
  const std::vector<uint32_t> key(these.begin(), these.end());
  auto found = batches.find(key);
  if (found == batches.end()) {
    Result<ShardBatch> made = ShardBatch::create(shards, these, codec_of);
    if (!made.ok()) return made.status();
    found = batches.emplace(key, std::move(made).value()).first;
  }
  return &found->second;
}

Result<const ShardBatch*> DeviceShardCodec::encoded_batch(std::span<const uint32_t> shards) {
  return find(
      encoded_batches_, *shards_,
      shards, [&](uint32_t i) -> auto& { return shards_->own_codec(i); });
}

Result<const ShardBatch*> DeviceShardCodec::decoded_batch(uint32_t shard, Direction direction) {
  return find(
      decoded_batches_[static_cast<size_t>(direction)], *shards_,
      {&shard, 1}, [&](uint32_t i) -> auto& { return shards_->codec(i, direction); });
}

Result<FirstNonFinite> DeviceShardCodec::find_non_finite(std::span<const uint32_t> shards) {
  return on_device([&] { return find_in(shards); });
}

Result<FirstNonFinite> DeviceShardCodec::find_in(std::span<const uint32_t> shards) {
  if (shards.empty()) return FirstNonFinite();
  uint64_t runs = 0;
  for (uint32_t shard : shards) runs += runs_[shard].size();
  GW_RETURN_IF_ERROR(results_.reserve(runs * sizeof(uint64_t)));
  GW_RETURN_IF_ERROR(results_on_host_.reserve(runs * sizeof(uint64_t)));
  auto* found = results_.as<uint64_t>();
  GW_RETURN_IF_ERROR(to_status(cudaMemsetAsync(found, 0xff, runs * sizeof(uint64_t), stream_)));
  for (uint32_t shard : shards) {
    for (const Run& run : runs_[shard]) {
      GW_RETURN_IF_ERROR(
          queue_find_non_finite(bucket_.data() + run.begin, run.n, found++, stream_));
    }
  }
  const auto* on_host = results_on_host_.as<uint64_t>();
  GW_RETURN_IF_ERROR(copy(results_on_host_.data(), results_.data(), runs * sizeof(uint64_t),
                          cudaMemcpyDeviceToHost));
  GW_RETURN_IF_ERROR(wait());
  for (uint32_t shard : shards) {
    for (const Run& run : runs_[shard]) {
      const uint64_t first = *on_host++;
      if (first == kNone) continue;
      for (uint32_t i : shards_->segments[shard]) {
        const uint64_t element = run.begin + first - segment(i).bucket_offset;
        if (element >= segment(i).n) continue;
        return FirstNonFinite(
            NonFiniteOrigin{.rank = shards_->rank, .segment = i, .element = element});
      }
    }
  }
  return FirstNonFinite();
}

Result<FirstNonFinite> DeviceShardCodec::encode(std::span<const uint32_t> shards,
                                                std::span<const uint32_t> finite, uint64_t step,
                                                std::span<PacketWriter> packets) {
  Result<FirstNonFinite> origin = encode_on_device(shards, finite, step, packets);
  if (!origin.ok() || origin.value()) return origin;
  if (std::ranges::find(shards, shards_->rank) == shards.end()) return origin;
  const Packet own = packets[shards_->rank].packet();
  const Packet* const owns[] = {&own};
  GW_RETURN_IF_ERROR(decode(shards_->rank, owns, DecodeMode::kStore, {}));
  return origin;
}

Result<FirstNonFinite> DeviceShardCodec::encode_on_device(std::span<const uint32_t> shards,
                                                          std::span<const uint32_t> finite,
                                                          uint64_t step,
                                                          std::span<PacketWriter> packets) {
  return on_device([&]() -> Result<FirstNonFinite> {
    Result<FirstNonFinite> origin = find_in(finite);
    if (!origin.ok() || origin.value()) return origin;
    Result<const ShardBatch*> found = encoded_batch(shards);
    if (!found.ok()) return found.status();
    const ShardBatch& batch = *found.value();
    GW_RETURN_IF_ERROR(queue_encode(batch, step));
    const std::span<const EncodedSegment> encoded(results_on_host_.as<EncodedSegment>(),
                                                  batch.slots().size());
    for (const ShardBatch::Slot& slot : batch.slots()) {
      const uint64_t element = encoded[slot.index].non_finite;
      if (element == EncodedSegment::kFinite) continue;
      const NonFiniteOrigin refused = {
          .rank = shards_->rank, .segment = slot.segment, .element = element};
      GW_RETURN_IF_ERROR(restore(batch, encoded));
      return FirstNonFinite(refused);
    }
    GW_RETURN_IF_ERROR(fetch_payloads(batch, encoded.data()));
    for (const ShardBatch::Slot& slot : batch.slots()) {
      const uint64_t size = encoded[slot.index].size;
      const std::byte* payload = payloads_on_host_.data() + slot.payload_begin;
      GW_RETURN_IF_ERROR(
          packets[slot.shard].add_encoded([&](std::span<std::byte> room) -> Result<uint64_t> {
            if (size > 0) std::memcpy(room.data(), payload, size);
            return size;
          }));
    }
    return FirstNonFinite();
  });
}

// Encodes the batch, and waits until its EncodedSegments are on the host.
Status DeviceShardCodec::queue_encode(const ShardBatch& batch, uint64_t step) {
  const uint64_t results = batch.slots().size() * sizeof(EncodedSegment);
  GW_RETURN_IF_ERROR(payloads_.reserve(batch.payloads_size()));
  GW_RETURN_IF_ERROR(scratch_.reserve(batch.scratch_size(0)));
  for (const ShardBatch::Part& part : batch.parts()) {
    const EncodeArguments arguments = {.table_dev = part.table.data(),
                                       .dtype = Dtype::kFloat32,
                                       .x_dev = bucket_.data(),
                                       .residual_type = part.residual_type,
                                       .residual_dev = residual_base(part.residual_type),
                                       .draw = {.seed = shards_->seed, .stream = 0, .step = step},
                                       .payloads_dev = payloads_.data() + part.payloads_begin,
                                       .encoded_dev = results_.as<EncodedSegment>() + part.first,
                                       .scratch_dev = scratch_.data()};
    GW_RETURN_IF_ERROR(part.codec.encode(arguments, stream_));
  }
  GW_RETURN_IF_ERROR(
      copy(results_on_host_.data(), results_.data(), results, cudaMemcpyDeviceToHost));
  return wait();
}

// Copies the payloads to the same places of payloads_on_host_.
Status DeviceShardCodec::fetch_payloads(const ShardBatch& batch, const EncodedSegment* encoded) {
  GW_RETURN_IF_ERROR(payloads_on_host_.reserve(batch.payloads_size()));
  Run copied = {0, 0};
  const auto flush = [&] {
    return copy(payloads_on_host_.data() + copied.begin, payloads_.data() + copied.begin, copied.n,
                cudaMemcpyDeviceToHost);
  };
  std::vector<Run> used(batch.slots().size());
  for (const ShardBatch::Slot& slot : batch.slots()) {
    used[slot.index] = {slot.payload_begin, encoded[slot.index].size};
  }
  for (const Run& payload : used) {
    if (payload.n == 0) continue;
    if (payload.begin > copied.begin + copied.n + kCopiedGap) {
      GW_RETURN_IF_ERROR(flush());
      copied = {payload.begin, 0};
    }
    copied.n = payload.begin + payload.n - copied.begin;
  }
  GW_RETURN_IF_ERROR(flush());
  return wait();
}

// Adds what was encoded back to the residuals, after some segment was refused.
Status DeviceShardCodec::restore(const ShardBatch& batch, std::span<const EncodedSegment> encoded) {
  GW_RETURN_IF_ERROR(fetch_payloads(batch, encoded.data()));
  for (const ShardBatch::Slot& slot : batch.slots()) {
    if (encoded[slot.index].non_finite != EncodedSegment::kFinite) continue;
    // One segment at a time, as this happens at most when x + residual overflows.
    const uint32_t i = slot.segment;
    if (residual_types_[i] == ResidualType::kNone) continue;
    std::vector<float> sent(segment(i).n);
    Result<Execution> execution = Execution::create();
    if (!execution.ok()) return execution.status();
    const std::span<const std::byte> payload(payloads_on_host_.data() + slot.payload_begin,
                                             encoded[slot.index].size);
    GW_RETURN_IF_ERROR(
        shards_->own_codec(i)->decode(payload, sent, DecodeMode::kStore, execution.value()));
    add_to_residual(i, 0, sent, 1.0f);
  }
  return failed_;
}

Status DeviceShardCodec::decode(uint32_t shard, std::span<const Packet* const> packets,
                                DecodeMode mode, const Next& next) {
  GW_RETURN_IF_ERROR(on_device([&]() -> Status {
    if (packets.empty()) return {};
    Result<const ShardBatch*> batch = decoded_batch(shard, packets[0]->header.direction);
    if (!batch.ok()) return batch.status();
    return decode_to(bucket_.data(), *batch.value(), packets, mode);
  }));
  if (next.divisor != 1.0f) divide(shard, next.divisor);
  return {};
}

// Decodes packets of the batch's shard to `out`, as long as the bucket.
Status DeviceShardCodec::decode_to(float* out, const ShardBatch& batch,
                                   std::span<const Packet* const> packets, DecodeMode mode) {
  const auto sources = static_cast<uint32_t>(packets.size());
  const uint64_t count = uint64_t{sources} * batch.slots().size();
  if (count == 0) return {};
  // One copy to the device holds the places, part by part, and the payloads after them.
  uint64_t size = count * sizeof(PayloadPlace);
  for (const Packet* packet : packets) {
    for (const PacketFrame& frame : packet->frames) size += frame.payload.size();
  }
  const uint64_t results = count * sizeof(DecodedSegment);
  GW_RETURN_IF_ERROR(payloads_.reserve(size));
  GW_RETURN_IF_ERROR(payloads_on_host_.reserve(size));
  GW_RETURN_IF_ERROR(results_.reserve(results));
  GW_RETURN_IF_ERROR(results_on_host_.reserve(results));
  GW_RETURN_IF_ERROR(scratch_.reserve(batch.scratch_size(sources)));
  // Places and results of a part: source by source, in each source by segment.
  const auto place_of = [&](const ShardBatch::Part& part, uint32_t source, uint32_t index) {
    return uint64_t{sources} * part.first + uint64_t{source} * part.count + (index - part.first);
  };
  auto* places = payloads_on_host_.as<PayloadPlace>();
  uint64_t end = count * sizeof(PayloadPlace);
  for (const ShardBatch::Part& part : batch.parts()) {
    for (const ShardBatch::Slot& slot : batch.slots()) {
      if (slot.index - part.first >= part.count) continue;
      for (uint32_t source = 0; source < sources; ++source) {
        const std::span<const std::byte> payload = packets[source]->frames[slot.frame].payload;
        places[place_of(part, source, slot.index)] = {end, payload.size()};
        if (!payload.empty()) {
          std::memcpy(payloads_on_host_.data() + end, payload.data(), payload.size());
        }
        end += payload.size();
      }
    }
  }
  GW_RETURN_IF_ERROR(copy(payloads_.data(), payloads_on_host_.data(), end, cudaMemcpyHostToDevice));
  for (const ShardBatch::Part& part : batch.parts()) {
    const uint64_t first = place_of(part, 0, part.first);
    GW_RETURN_IF_ERROR(part.codec.decode({.table_dev = part.table.data(),
                                          .payloads_dev = payloads_.data(),
                                          .places_dev = payloads_.as<PayloadPlace>() + first,
                                          .sources = sources,
                                          .out_dev = out,
                                          .mode = mode,
                                          .divisor = 0,
                                          .decoded_dev = results_.as<DecodedSegment>() + first,
                                          .scratch_dev = scratch_.data()},
                                         stream_));
  }
  GW_RETURN_IF_ERROR(
      copy(results_on_host_.data(), results_.data(), results, cudaMemcpyDeviceToHost));
  GW_RETURN_IF_ERROR(wait());
  const std::span<const DecodedSegment> decoded(results_on_host_.as<DecodedSegment>(), count);
  if (std::ranges::all_of(decoded, [](const DecodedSegment& one) { return one.valid != 0; })) {
    return {};
  }
  return {StatusCode::kCorruptPayload, "a payload is corrupt: its codec does not make such bytes"};
}

// Decodes what was encoded into the packet to sent_.
Status DeviceShardCodec::decode_sent(uint32_t shard, const Packet& packet) {
  GW_RETURN_IF_ERROR(sent_.reserve(shards_->layout->numel() * sizeof(float)));
  Result<const ShardBatch*> batch = decoded_batch(shard, shards_->direction(shard));
  if (!batch.ok()) return batch.status();
  const Packet* const packets[] = {&packet};
  return decode_to(sent_.as<float>(), *batch.value(), packets, DecodeMode::kStore);
}

void DeviceShardCodec::put_back(uint32_t shard, const Packet& packet) {
  if (packet.frames.empty()) return;
  run([&]() -> Status {
    GW_RETURN_IF_ERROR(decode_sent(shard, packet));
    for (uint32_t i : shards_->segments[shard]) {
      if (residual_types_[i] == ResidualType::kNone) continue;
      GW_RETURN_IF_ERROR(queue_add_to_residual(residual_values(i),
                                               sent_.as<float>() + segment(i).bucket_offset,
                                               segment(i).n, 1.0f, stream_));
    }
    return wait();
  });
}

void DeviceShardCodec::divide(uint32_t shard, float divisor) {
  run([&]() -> Status {
    for (const Run& run : runs_[shard]) {
      GW_RETURN_IF_ERROR(queue_divide(bucket_.data() + run.begin, run.n, divisor, stream_));
    }
    return {};
  });
}

void DeviceShardCodec::fill_nan(uint32_t shard) {
  run([&]() -> Status {
    for (const Run& run : runs_[shard]) {
      GW_RETURN_IF_ERROR(queue_fill_nan(bucket_.data() + run.begin, run.n, stream_));
    }
    return {};
  });
}

ResidualValues DeviceShardCodec::residual_values(uint32_t i, uint64_t first) const {
  const ResidualType type = residual_types_[i];
  const uint64_t size = type == ResidualType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  return {type,
          static_cast<std::byte*>(residual_base(type)) + (segment(i).bucket_offset + first) * size};
}

std::vector<float> DeviceShardCodec::residual(uint32_t i) const {
  const uint64_t n = segment(i).n;
  Residual copied(residual_types_[i], n);
  if (copied.type() == ResidualType::kNone) return copied.values();
  const CurrentDevice current(device_);
  const ResidualView view = copied.view();
  const bool wide = copied.type() == ResidualType::kFloat32;
  void* to = wide ? static_cast<void*>(view.f32()) : static_cast<void*>(view.bf16());
  // An error shows at the next call that has a Status, as the device is lost.
  static_cast<void>(copy(to, residual_values(i).values,
                         n * (wide ? sizeof(float) : sizeof(uint16_t)), cudaMemcpyDeviceToHost));
  static_cast<void>(wait());
  return copied.values();
}

void DeviceShardCodec::reset_residual(uint32_t i, ResidualType type) {
  residual_types_[i] = type;
  if (type == ResidualType::kNone) return;
  run([&]() -> Status {
    const uint64_t size = type == ResidualType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
    DeviceMemory& memory = residuals_[static_cast<size_t>(type)];
    GW_RETURN_IF_ERROR(memory.reserve(shards_->layout->numel() * size));
    GW_RETURN_IF_ERROR(
        to_status(cudaMemsetAsync(residual_values(i).values, 0, segment(i).n * size, stream_)));
    return wait();
  });
}

void DeviceShardCodec::add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                                       float factor) {
  if (residual_types_[i] == ResidualType::kNone) return;
  run([&]() -> Status {
    GW_RETURN_IF_ERROR(sent_.reserve(shards_->layout->numel() * sizeof(float)));
    GW_RETURN_IF_ERROR(
        copy(sent_.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
    GW_RETURN_IF_ERROR(queue_add_to_residual(residual_values(i, first), sent_.as<float>(),
                                             values.size(), factor, stream_));
    return wait();
  });
}

void DeviceShardCodec::scale_residuals(float factor) {
  run([&]() -> Status {
    for (uint32_t i = 0; i < residual_types_.size(); ++i) {
      if (residual_types_[i] == ResidualType::kNone) continue;
      GW_RETURN_IF_ERROR(queue_scale_residual(residual_values(i), segment(i).n, factor, stream_));
    }
    return {};
  });
}

void DeviceShardCodec::pay_residual(uint32_t i) {
  if (residual_types_[i] == ResidualType::kNone) return;
  run([&] { return queue_pay(residual_values(i), values(i), segment(i).n, stream_); });
}

void DeviceShardCodec::add_norms(uint32_t shard, const Packet& packet, Norms& norms) {
  if (packet.frames.empty()) return;  // a ring encodes one shard at a time
  run([&] { return read_norms(shard, packet, norms); });
}

Status DeviceShardCodec::read_norms(uint32_t shard, const Packet& packet, Norms& norms) {
  GW_RETURN_IF_ERROR(decode_sent(shard, packet));
  auto* sums = results_.as<double>();
  GW_RETURN_IF_ERROR(to_status(cudaMemsetAsync(sums, 0, 2 * sizeof(double), stream_)));
  for (uint32_t i : shards_->segments[shard]) {
    const uint64_t n = segment(i).n;
    GW_RETURN_IF_ERROR(queue_add_squares(values(i), nullptr, n, &sums[0], stream_));
    GW_RETURN_IF_ERROR(residual_types_[i] == ResidualType::kNone
                           ? queue_add_squares(values(i),
                                               sent_.as<float>() + segment(i).bucket_offset, n,
                                               &sums[1], stream_)
                           : queue_add_squares(residual_values(i), n, &sums[1], stream_));
  }
  const auto* on_host = results_on_host_.as<double>();
  GW_RETURN_IF_ERROR(
      copy(results_on_host_.data(), sums, 2 * sizeof(double), cudaMemcpyDeviceToHost));
  GW_RETURN_IF_ERROR(wait());
  norms.input += on_host[0];
  norms.error += on_host[1];
  return {};
}

}  // namespace

ShardCodecFactory device_shard_codecs(int device, cudaStream_t stream) {
  return [device,
          stream](std::shared_ptr<const Shards> shards) -> Result<std::unique_ptr<ShardCodec>> {
    auto codec = std::make_unique<DeviceShardCodec>(std::move(shards), device, stream);
    GW_RETURN_IF_ERROR(codec->prepare());
    return std::unique_ptr<ShardCodec>(std::move(codec));
  };
}

}  // namespace gradwire::cuda
