#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "base/return_if_error.h"
#include "cuda/shards/device_shard_codec.h"
#include "cuda/shards/device_work.cuh"
#include "cuda/shards/shard_batch.h"
#include "gradwire/cuda.h"
#include "gradwire/residual.h"

namespace gradwire::cuda {
namespace {

// Payloads with a smaller gap between them are copied to the host together.
constexpr uint64_t kCopiedGap = 16384;
constexpr uint64_t kNone = ~uint64_t{0};

struct Run {
  uint64_t begin;
  uint64_t n;
};

uint64_t size_of(ResidualType type) {
  return type == ResidualType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

class DeviceShardCodec final : public ShardCodec {
 public:
  DeviceShardCodec(std::shared_ptr<const Shards> shards, int device, cudaStream_t stream,
                   ResidualMemory residuals)
      : shards_(std::move(shards)),
        work_(device, stream),
        runs_(shards_->segments.size()),
        residual_memory_(residuals) {}

  // Takes the memory of residuals. kUnknownCodec: a codec has no kernels.
  Status prepare();

  void begin(std::span<float> bucket) override { bucket_ = bucket; }
  Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards) override;
  Result<FirstNonFinite> encode(std::span<const uint32_t> shards, std::span<const uint32_t> finite,
                                uint64_t step, std::span<PacketWriter> packets,
                                const Encoded& encoded) override;
  void put_back(uint32_t shard, const Packet& packet) override;
  Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                const Next& next) override;
  void divide(uint32_t shard, float divisor) override { change_values(shard, divide_run, divisor); }
  void fill_nan(uint32_t shard) override {
    change_values(shard, fill_with, std::numeric_limits<float>::quiet_NaN());
  }

  ResidualType residual_type(uint32_t i) const override { return residual_types_[i]; }
  std::vector<float> residual(uint32_t i) const override;
  void reset_residual(uint32_t i, ResidualType type) override;
  void add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                       float factor) override;
  void scale_residuals(float factor) override;
  void pay_residual(uint32_t i) override;
  void add_norms(uint32_t shard, const Packet& packet, Norms& norms) override;
  std::vector<ResidualNorms> residual_norms(std::span<const uint32_t> shards) override;

 private:
  [[nodiscard]] const Segment& segment(uint32_t i) const { return shards_->segment(i); }
  [[nodiscard]] bool has_residual(uint32_t i) const {
    return residual_types_[i] != ResidualType::kNone;
  }
  // Where segment i begins in an array that is as long as the bucket.
  template <typename T>
  [[nodiscard]] T* part_of(T* bucket, uint32_t i) const {
    return bucket + segment(i).bucket_offset;
  }
  [[nodiscard]] void* residual_base(ResidualType type) const {
    if (type == ResidualType::kNone) return nullptr;
    const auto i = static_cast<size_t>(type);
    return on_host() ? residuals_on_host_[i].data() : residuals_[i].data();
  }
  [[nodiscard]] bool on_host() const { return residual_memory_ == ResidualMemory::kHost; }
  // The residual of segment i from its value `first` on.
  [[nodiscard]] ResidualValues residual_values(uint32_t i, uint64_t first = 0) const {
    const ResidualType type = residual_types_[i];
    return {type, static_cast<std::byte*>(residual_base(type)) +
                      (segment(i).bucket_offset + first) * size_of(type)};
  }
  // Returns sent_, after it has room for the bucket.
  float* sent() {
    work_.run([&] { return sent_.reserve(shards_->layout->numel() * sizeof(float)); });
    return sent_.as<float>();
  }
  // Queues a kernel for all values of a shard.
  template <typename... Parameters>
  void change_values(uint32_t shard, void (*kernel)(uint64_t, float*, Parameters...),
                     Parameters... parameters) {
    const CurrentDevice current(work_);
    for (const Run& run : runs_[shard]) {
      work_.launch(kernel, run.n, bucket_.data() + run.begin, parameters...);
    }
  }

  Result<const ShardBatch*> batch_of(const std::vector<ShardBatch::Shard>& shards);
  Result<FirstNonFinite> find_in(std::span<const uint32_t> shards);
  void fetch_payloads(const ShardBatch& batch, std::span<const EncodedSegment> encoded);
  Status restore(const ShardBatch& batch, std::span<const EncodedSegment> encoded);
  Status decode_to(float* out, uint32_t shard, std::span<const Packet* const> packets,
                   DecodeMode mode, float divisor = 1.0f);
  // Decodes what was encoded into the packet to sent_.
  Status decode_sent(uint32_t shard, const Packet& packet) {
    const Packet* const packets[] = {&packet};
    return decode_to(sent(), shard, packets, DecodeMode::kStore);
  }

  std::shared_ptr<const Shards> shards_;
  mutable DeviceWork work_;
  std::vector<std::vector<Run>> runs_;  // of each shard: contiguous values in the bucket
  std::span<float> bucket_;             // addresses of the device

  std::vector<ResidualType> residual_types_;  // of each segment
  ResidualMemory residual_memory_;
  DeviceMemory residuals_[3];  // by type, each as long as the bucket, or empty
  PinnedMemory residuals_on_host_[3];

  std::map<std::vector<ShardBatch::Shard>, ShardBatch> batches_;
  DeviceMemory scratch_;
  DeviceMemory payloads_;  // encoded or received payloads
  PinnedMemory payloads_on_host_;
  DeviceMemory sent_;  // values that were sent, as long as the bucket
};

Status DeviceShardCodec::prepare() {
  const CurrentDevice current(work_);
  for (uint32_t i = 0; i < shards_->layout->segments().size(); ++i) {
    for (Direction direction : {Direction::kPush, Direction::kPull}) {
      GW_RETURN_IF_ERROR(create_bucket_codec(shards_->codec(i, direction)->text(), {}).status());
    }
    residual_types_.push_back(ResidualType::kNone);
    reset_residual(i, shards_->residual_type(i));
    std::vector<Run>& runs = runs_[segment(i).owner];
    const uint64_t begin = segment(i).bucket_offset;
    if (runs.empty() || runs.back().begin + runs.back().n != begin) runs.push_back({begin, 0});
    runs.back().n += segment(i).n;
  }
  return work_.status();
}

Result<const ShardBatch*> DeviceShardCodec::batch_of(const std::vector<ShardBatch::Shard>& shards) {
  auto found = batches_.find(shards);
  if (found == batches_.end()) {
    GW_ASSIGN_OR_RETURN(ShardBatch made, ShardBatch::create(*shards_, shards));
    found = batches_.emplace(shards, std::move(made)).first;
  }
  return &found->second;
}

Result<FirstNonFinite> DeviceShardCodec::find_non_finite(std::span<const uint32_t> shards) {
  const CurrentDevice current(work_);
  return find_in(shards);
}

Result<FirstNonFinite> DeviceShardCodec::find_in(std::span<const uint32_t> shards) {
  std::vector<Run> runs;
  for (uint32_t shard : shards) {
    runs.insert(runs.end(), runs_[shard].begin(), runs_[shard].end());
  }
  if (runs.empty()) return FirstNonFinite();
  auto* results = work_.results<uint64_t>(runs.size());
  work_.fill(results, 0xff, runs.size() * sizeof(uint64_t));
  for (size_t k = 0; k < runs.size(); ++k) {
    work_.launch(cuda::find_non_finite, runs[k].n, bucket_.data() + runs[k].begin, results + k);
  }
  const std::span<const uint64_t> found = work_.fetch_results<uint64_t>(runs.size());
  GW_RETURN_IF_ERROR(work_.status());
  for (size_t k = 0; k < runs.size(); ++k) {
    if (found[k] == kNone) continue;
    for (uint32_t i = 0; i < residual_types_.size(); ++i) {
      const uint64_t element = runs[k].begin + found[k] - segment(i).bucket_offset;
      if (element >= segment(i).n) continue;
      return FirstNonFinite(
          NonFiniteOrigin{.rank = shards_->rank, .segment = i, .element = element});
    }
  }
  return FirstNonFinite();
}

Result<FirstNonFinite> DeviceShardCodec::encode(std::span<const uint32_t> shards,
                                                std::span<const uint32_t> finite, uint64_t step,
                                                std::span<PacketWriter> packets,
                                                const Encoded& encoded_shard) {
  const CurrentDevice current(work_);
  Result<FirstNonFinite> origin = find_in(finite);
  if (!origin.ok() || origin.value()) return origin;
  std::vector<ShardBatch::Shard> directed;
  for (uint32_t shard : shards) directed.emplace_back(shard, shards_->direction(shard));
  GW_ASSIGN_OR_RETURN(const ShardBatch* const found, batch_of(directed));
  const ShardBatch& batch = *found;

  auto* results = work_.results<EncodedSegment>(batch.slots().size());
  work_.run([&] { return payloads_.reserve(batch.payloads_size()); });
  work_.run([&] { return scratch_.reserve(batch.scratch_size(0)); });
  for (const ShardBatch::Part& part : batch.parts()) {
    const ResidualType residual_type = part.codec.codec().residual_type();
    const EncodeArguments arguments = {.table_dev = part.table.data(),
                                       .dtype = Dtype::kFloat32,
                                       .x_dev = bucket_.data(),
                                       .residual_type = residual_type,
                                       .residual_dev = residual_base(residual_type),
                                       .draw = {.seed = shards_->seed, .stream = 0, .step = step},
                                       .payloads_dev = payloads_.data() + part.payloads_begin,
                                       .encoded_dev = results + part.first,
                                       .scratch_dev = scratch_.data()};
    work_.run([&] { return part.codec.encode(arguments, work_.stream); });
  }
  const auto encoded = work_.fetch_results<EncodedSegment>(batch.slots().size());
  GW_RETURN_IF_ERROR(work_.status());

  for (const ShardBatch::Slot& slot : batch.slots()) {
    const uint64_t element = encoded[slot.index].non_finite;
    if (element == EncodedSegment::kFinite) continue;
    const NonFiniteOrigin refused = {
        .rank = shards_->rank, .segment = slot.segment, .element = element};
    GW_RETURN_IF_ERROR(restore(batch, encoded));
    return FirstNonFinite(refused);
  }
  fetch_payloads(batch, encoded);
  GW_RETURN_IF_ERROR(work_.status());
  for (const ShardBatch::Slot& slot : batch.slots()) {
    const uint64_t size = encoded[slot.index].size;
    const std::byte* payload = payloads_on_host_.data() + slot.payload_begin;
    GW_RETURN_IF_ERROR(
        packets[slot.shard].add_encoded([&](std::span<std::byte> room) -> Result<uint64_t> {
          if (size > 0) std::memcpy(room.data(), payload, size);
          return size;
        }));
  }
  if (std::ranges::find(shards, shards_->rank) != shards.end()) {
    const Packet own = packets[shards_->rank].packet();
    const Packet* const owns[] = {&own};
    GW_RETURN_IF_ERROR(decode_to(bucket_.data(), shards_->rank, owns, DecodeMode::kStore));
  }
  std::ranges::for_each(shards, encoded_shard);
  return FirstNonFinite();
}

// Copies the payloads to the same places of payloads_on_host_.
void DeviceShardCodec::fetch_payloads(const ShardBatch& batch,
                                      std::span<const EncodedSegment> encoded) {
  work_.run([&] { return payloads_on_host_.reserve(batch.payloads_size()); });
  Run copied = {0, 0};
  const auto flush = [&] {
    work_.copy(payloads_on_host_.data() + copied.begin, payloads_.data() + copied.begin, copied.n,
               cudaMemcpyDeviceToHost);
  };
  std::vector<Run> used(batch.slots().size());
  for (const ShardBatch::Slot& slot : batch.slots()) {
    used[slot.index] = {slot.payload_begin, encoded[slot.index].size};
  }
  for (const Run& payload : used) {
    if (payload.n == 0) continue;
    if (payload.begin > copied.begin + copied.n + kCopiedGap) {
      flush();
      copied = {payload.begin, 0};
    }
    copied.n = payload.begin + payload.n - copied.begin;
  }
  flush();
  work_.wait();
}

// Adds what was encoded back to the residuals, after some segment was refused.
Status DeviceShardCodec::restore(const ShardBatch& batch, std::span<const EncodedSegment> encoded) {
  fetch_payloads(batch, encoded);
  GW_RETURN_IF_ERROR(work_.status());
  for (const ShardBatch::Slot& slot : batch.slots()) {
    const uint32_t i = slot.segment;
    if (encoded[slot.index].non_finite != EncodedSegment::kFinite || !has_residual(i)) continue;
    // One segment at a time, as this happens at most when x + residual overflows.
    std::vector<float> values(segment(i).n);
    GW_ASSIGN_OR_RETURN(Execution execution, Execution::create());
    const std::span<const std::byte> payload(payloads_on_host_.data() + slot.payload_begin,
                                             encoded[slot.index].size);
    GW_RETURN_IF_ERROR(
        shards_->own_codec(i)->decode(payload, values, DecodeMode::kStore, execution));
    add_to_residual(i, 0, values, 1.0f);
  }
  return work_.status();
}

Status DeviceShardCodec::decode(uint32_t shard, std::span<const Packet* const> packets,
                                DecodeMode mode, const Next& next) {
  const CurrentDevice current(work_);
  return decode_to(bucket_.data(), shard, packets, mode, next.divisor);
}

// Decodes packets of a shard to `out`, which is as long as the bucket, and divides the sum.
Status DeviceShardCodec::decode_to(float* out, uint32_t shard,
                                   std::span<const Packet* const> packets, DecodeMode mode,
                                   float divisor) {
  GW_ASSIGN_OR_RETURN(const ShardBatch* const found,
                      batch_of({{shard, packets[0]->header.direction}}));
  const ShardBatch& batch = *found;
  const auto sources = static_cast<uint32_t>(packets.size());
  const uint64_t count = uint64_t{sources} * batch.slots().size();
  if (count == 0) return {};
  // One copy to the device holds the places, part by part, and the payloads after them.
  uint64_t size = count * sizeof(PayloadPlace);
  for (const Packet* packet : packets) {
    for (const PacketFrame& frame : packet->frames) size += frame.payload.size();
  }
  auto* results = work_.results<DecodedSegment>(count);
  work_.run([&] { return payloads_.reserve(size); });
  work_.run([&] { return payloads_on_host_.reserve(size); });
  work_.run([&] { return scratch_.reserve(batch.scratch_size(sources)); });
  GW_RETURN_IF_ERROR(work_.status());
  auto* places = payloads_on_host_.as<PayloadPlace>();
  uint64_t end = count * sizeof(PayloadPlace);
  for (const ShardBatch::Slot& slot : batch.slots()) {
    // Places and results of a part: source by source, in each source by segment.
    const ShardBatch::Part& part = batch.parts()[slot.part];
    uint64_t place = uint64_t{sources} * part.first + (slot.index - part.first);
    for (const Packet* packet : packets) {
      const std::span<const std::byte> payload = packet->frames[slot.frame].payload;
      places[place] = {end, payload.size()};
      std::ranges::copy(payload, payloads_on_host_.data() + end);
      end += payload.size();
      place += part.count;
    }
  }
  work_.copy(payloads_.data(), places, end, cudaMemcpyHostToDevice);
  for (const ShardBatch::Part& part : batch.parts()) {
    const uint64_t first = uint64_t{sources} * part.first;
    const DecodeArguments arguments = {.table_dev = part.table.data(),
                                       .payloads_dev = payloads_.data(),
                                       .places_dev = payloads_.as<PayloadPlace>() + first,
                                       .sources = sources,
                                       .out_dev = out,
                                       .mode = mode,
                                       .divisor = divisor,
                                       .decoded_dev = results + first,
                                       .scratch_dev = scratch_.data()};
    work_.run([&] { return part.codec.decode(arguments, work_.stream); });
  }
  const auto decoded = work_.fetch_results<DecodedSegment>(count);
  GW_RETURN_IF_ERROR(work_.status());
  if (std::ranges::all_of(decoded, [](const DecodedSegment& one) { return one.valid != 0; })) {
    return {};
  }
  return {StatusCode::kCorruptPayload, "a payload is corrupt: its codec does not make such bytes"};
}

void DeviceShardCodec::put_back(uint32_t shard, const Packet& packet) {
  if (packet.frames.empty()) return;
  const CurrentDevice current(work_);
  if (!decode_sent(shard, packet).ok()) return;
  for (uint32_t i : shards_->segments[shard]) {
    if (!has_residual(i)) continue;
    work_.launch(add_values, segment(i).n, residual_values(i), part_of(sent(), i), 1.0f);
  }
  work_.wait();
}

std::vector<float> DeviceShardCodec::residual(uint32_t i) const {
  const uint64_t n = segment(i).n;
  Residual copied(residual_types_[i], n);
  if (!has_residual(i)) return copied.values();
  const CurrentDevice current(work_);
  const ResidualView view = copied.view();
  const bool wide = copied.type() == ResidualType::kFloat32;
  void* to = wide ? static_cast<void*>(view.f32()) : static_cast<void*>(view.bf16());
  work_.copy(to, residual_values(i).values, n * size_of(copied.type()), cudaMemcpyDefault);
  work_.wait();
  return copied.values();
}

void DeviceShardCodec::reset_residual(uint32_t i, ResidualType type) {
  residual_types_[i] = type;
  if (type == ResidualType::kNone) return;
  const CurrentDevice current(work_);
  work_.run([&] {
    const uint64_t size = shards_->layout->numel() * size_of(type);
    const auto of_type = static_cast<size_t>(type);
    return on_host() ? residuals_on_host_[of_type].reserve(size)
                     : residuals_[of_type].reserve(size);
  });
  work_.fill(residual_values(i).values, 0, segment(i).n * size_of(type));
  work_.wait();
}

void DeviceShardCodec::add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                                       float factor) {
  if (!has_residual(i)) return;
  const CurrentDevice current(work_);
  float* on_device = sent();
  work_.copy(on_device, values.data(), values.size_bytes(), cudaMemcpyHostToDevice);
  work_.launch(add_values, values.size(), residual_values(i, first), on_device, factor);
  work_.wait();
}

void DeviceShardCodec::scale_residuals(float factor) {
  const CurrentDevice current(work_);
  for (uint32_t i = 0; i < residual_types_.size(); ++i) {
    if (has_residual(i)) work_.launch(scale_residual, segment(i).n, residual_values(i), factor);
  }
}

void DeviceShardCodec::pay_residual(uint32_t i) {
  if (!has_residual(i)) return;
  const CurrentDevice current(work_);
  work_.launch(pay, segment(i).n, residual_values(i), part_of(bucket_.data(), i));
}

void DeviceShardCodec::add_norms(uint32_t shard, const Packet& packet, Norms& norms) {
  if (packet.frames.empty()) return;  // a ring encodes one shard at a time
  const CurrentDevice current(work_);
  if (!decode_sent(shard, packet).ok()) return;
  auto* sums = work_.results<double>(2);
  work_.fill(sums, 0, 2 * sizeof(double));
  for (uint32_t i : shards_->segments[shard]) {
    if (!shards_->compressed[i]) continue;
    const uint64_t n = segment(i).n;
    const ResidualValues x = {ResidualType::kFloat32, part_of(bucket_.data(), i)};
    work_.launch(add_squares, n, x, nullptr, &sums[0]);
    if (has_residual(i)) {
      work_.launch(add_squares, n, residual_values(i), nullptr, &sums[1]);
    } else {
      work_.launch(add_squares, n, x, part_of(sent(), i), &sums[1]);
    }
  }
  const std::span<const double> found = work_.fetch_results<double>(2);
  if (!work_.status().ok()) return;
  norms.input += found[0];
  norms.error += found[1];
}

std::vector<ShardCodec::ResidualNorms> DeviceShardCodec::residual_norms(
    std::span<const uint32_t> shards) {
  std::vector<ResidualNorms> norms;
  for (uint32_t shard : shards) {
    for (uint32_t i : shards_->segments[shard]) {
      if (has_residual(i)) norms.push_back({.segment = i, .residual = 0, .input = 0});
    }
  }
  if (norms.empty()) return norms;
  const CurrentDevice current(work_);
  auto* sums = work_.results<double>(2 * norms.size());
  work_.fill(sums, 0, 2 * norms.size() * sizeof(double));
  for (size_t k = 0; k < norms.size(); ++k) {
    const uint32_t i = norms[k].segment;
    const ResidualValues x = {ResidualType::kFloat32, part_of(bucket_.data(), i)};
    work_.launch(add_squares, segment(i).n, residual_values(i), nullptr, &sums[2 * k]);
    work_.launch(add_squares, segment(i).n, x, nullptr, &sums[2 * k + 1]);
  }
  const std::span<const double> found = work_.fetch_results<double>(2 * norms.size());
  if (!work_.status().ok()) return {};
  for (size_t k = 0; k < norms.size(); ++k) {
    norms[k].residual = found[2 * k];
    norms[k].input = found[2 * k + 1];
  }
  return norms;
}

}  // namespace

ShardCodecFactory device_shard_codecs(int device, cudaStream_t stream, ResidualMemory residuals) {
  return [=](std::shared_ptr<const Shards> shards) -> Result<std::unique_ptr<ShardCodec>> {
    auto codec = std::make_unique<DeviceShardCodec>(std::move(shards), device, stream, residuals);
    GW_RETURN_IF_ERROR(codec->prepare());
    return std::unique_ptr<ShardCodec>(std::move(codec));
  };
}

}  // namespace gradwire::cuda
