#include "engines/simulated/charged_codec.h"

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/return_if_error.h"

namespace gradwire {
namespace {

class ChargedCodec final : public ShardCodec {
 public:
  ChargedCodec(std::unique_ptr<ShardCodec> codec, const Shards& shards, const CostOfCodec& cost,
               double* seconds)
      : codec_(std::move(codec)), seconds_(seconds) {
    for (const auto& segments : shards.segments) {
      ShardCost& shard = shards_.emplace_back();
      for (uint32_t i : segments) {
        const auto n = static_cast<double>(shards.segment(i).n);
        shard.encode += n * cost(shards.own_codec(i)->text()).encode;
        shard.decode_push += n * cost(shards.codec(i, Direction::kPush)->text()).decode;
        shard.decode_pull += n * cost(shards.codec(i, Direction::kPull)->text()).decode;
      }
    }
  }

  void wait_by(Arrive arrive) override { codec_->wait_by(std::move(arrive)); }
  void begin(std::span<float> bucket) override { codec_->begin(bucket); }
  Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards) override {
    return codec_->find_non_finite(shards);
  }
  Result<FirstNonFinite> encode(std::span<const uint32_t> shards, std::span<const uint32_t> finite,
                                uint64_t step, std::span<PacketWriter> packets,
                                const Encoded& encoded) override {
    for (uint32_t shard : shards) *seconds_ += shards_[shard].encode;
    return codec_->encode(shards, finite, step, packets, encoded);
  }
  Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                const Next& next) override {
    for (const Packet* packet : packets) {
      const ShardCost& cost = shards_[shard];
      *seconds_ +=
          packet->header.direction == Direction::kPush ? cost.decode_push : cost.decode_pull;
    }
    return codec_->decode(shard, packets, mode, next);
  }
  void put_back(uint32_t shard, const Packet& packet) override { codec_->put_back(shard, packet); }
  void divide(uint32_t shard, float divisor) override { codec_->divide(shard, divisor); }
  void fill_nan(uint32_t shard) override { codec_->fill_nan(shard); }
  ResidualType residual_type(uint32_t i) const override { return codec_->residual_type(i); }
  std::vector<float> residual(uint32_t i) const override { return codec_->residual(i); }
  void reset_residual(uint32_t i, ResidualType type) override { codec_->reset_residual(i, type); }
  void add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                       float factor) override {
    codec_->add_to_residual(i, first, values, factor);
  }
  void scale_residuals(float factor) override { codec_->scale_residuals(factor); }
  uint64_t residual_bytes() const override { return codec_->residual_bytes(); }
  void keep_residuals_in(std::span<std::byte> memory) override {
    codec_->keep_residuals_in(memory);
  }
  void pay_residual(uint32_t i) override { codec_->pay_residual(i); }
  void add_norms(uint32_t shard, const Packet& packet, Norms& norms) override {
    codec_->add_norms(shard, packet, norms);
  }
  std::vector<ResidualNorms> residual_norms(std::span<const uint32_t> shards) override {
    return codec_->residual_norms(shards);
  }
  SharedScales* share_scales() override { return codec_->share_scales(); }

 private:
  struct ShardCost {  // seconds for the whole shard
    double encode = 0;
    double decode_push = 0;
    double decode_pull = 0;
  };

  std::unique_ptr<ShardCodec> codec_;
  std::vector<ShardCost> shards_;
  double* seconds_;
};

}  // namespace

ShardCodecFactory charge(ShardCodecFactory codecs, CostOfCodec cost, double* seconds) {
  return [codecs = std::move(codecs), cost = std::move(cost), seconds](
             const std::shared_ptr<const Shards>& shards) -> Result<std::unique_ptr<ShardCodec>> {
    GW_ASSIGN_OR_RETURN(std::unique_ptr<ShardCodec> codec, codecs(shards));
    return std::unique_ptr<ShardCodec>(
        std::make_unique<ChargedCodec>(std::move(codec), *shards, cost, seconds));
  };
}

}  // namespace gradwire
