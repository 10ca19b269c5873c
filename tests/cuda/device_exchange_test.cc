// Exchanges of buckets on a device give the same bits with the same messages as on the host. So
// ranks on a host and on a device can exchange with each other.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "cuda/device_memory.h"
#include "cuda/shards/device_shard_codec.h"
#include "engines/loopback/loopback.h"
#include "exchange/steps/exchange_entry.h"
#include "tests/exchange/cluster.h"

namespace gradwire::cuda {
namespace {

enum class Place : uint8_t { kHost, kDevice, kOffloaded };  // kOffloaded: but for the residuals

ShardCodecFactory codecs_at(Place place) {
  if (place == Place::kHost) return host_shard_codecs(Execution::create().value());
  return device_shard_codecs(
      0, nullptr, place == Place::kDevice ? ResidualMemory::kDevice : ResidualMemory::kHost);
}

using Make = std::function<Result<std::unique_ptr<Exchange>>(std::shared_ptr<const Layout>,
                                                             uint32_t rank, ShardCodecFactory)>;

Make make_of(const char* kind) {
  return [kind](const auto& layout, uint32_t rank, const auto& codecs) {
    return make_exchange(
        kind, {.layout = layout, .rank = rank, .codecs = codecs, .options = {.seed = 7}});
  };
}

// All ranks of an exchange, each on the host or on the device.
class Ranks {
 public:
  Ranks(const Make& make, std::shared_ptr<const Layout> layout, std::vector<Place> places)
      : places_(std::move(places)) {
    for (uint32_t rank = 0; rank < places_.size(); ++rank) {
      exchanges_.push_back(make(layout, rank, codecs_at(places_[rank])).value());
    }
  }

  Exchange& rank(uint32_t r) { return *exchanges_[r]; }

  Status step(Buckets& buckets, uint64_t number) {
    std::vector<std::unique_ptr<DeviceArray<float>>> on_device(places_.size());
    std::vector<std::span<float>> spans;
    std::vector<Exchange*> exchanges;
    for (size_t r = 0; r < places_.size(); ++r) {
      exchanges.push_back(exchanges_[r].get());
      spans.emplace_back(buckets[r]);
      if (places_[r] == Place::kHost) continue;
      on_device[r] = std::make_unique<DeviceArray<float>>(std::span<const float>(buckets[r]));
      spans[r] = {on_device[r]->data(), buckets[r].size()};
    }
    const Status status = run_loopback_step(exchanges, spans, number);
    for (size_t r = 0; r < places_.size(); ++r) {
      if (on_device[r]) buckets[r] = on_device[r]->read();
    }
    return status;
  }

  std::vector<ResidualPiece> residuals() const {
    std::vector<ResidualPiece> pieces;
    for (const auto& exchange : exchanges_) {
      for (ResidualPiece& piece : exchange->export_residuals()) pieces.push_back(std::move(piece));
    }
    return pieces;
  }

  void retract() {
    for (const auto& exchange : exchanges_) exchange->retract();
  }
  void scale(float factor) {
    for (const auto& exchange : exchanges_) exchange->scale_residuals(factor);
  }

 private:
  std::vector<Place> places_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
};

// The same ranks twice: all on the host, and some or all on the device.
class Pair {
 public:
  Pair(const Make& make, std::vector<Place> places, const LayoutOptions& options)
      : world_(static_cast<uint32_t>(places.size())),
        layout_(std::make_shared<const Layout>(
            Layout::create(small_tensors(), world_, options).value())),
        host_(make, layout_, std::vector<Place>(places.size(), Place::kHost)),
        other_(make, layout_, std::move(places)) {}

  Ranks& other() { return other_; }
  uint64_t numel() const { return layout_->numel(); }
  Buckets draw(uint64_t seed) const { return random_buckets(world_, numel(), seed); }

  void step(const Buckets& buckets, uint64_t number) {
    Buckets on_host = buckets;
    Buckets elsewhere = buckets;
    ASSERT_TRUE(host_.step(on_host, number).ok());
    const Status status = other_.step(elsewhere, number);
    ASSERT_TRUE(status.ok()) << status.message();
    for (uint32_t r = 0; r < world_; ++r) {
      EXPECT_TRUE(gradwire::same_bits(on_host[r], elsewhere[r])) << "rank " << r;
      EXPECT_EQ(host_.rank(r).stats().push_bytes_sent, other_.rank(r).stats().push_bytes_sent);
      EXPECT_EQ(host_.rank(r).stats().pull_bytes_sent, other_.rank(r).stats().pull_bytes_sent);
      EXPECT_EQ(host_.rank(r).non_finite().has_value(), other_.rank(r).non_finite().has_value());
    }
    compare_residuals();
  }
  void compare_residuals() {
    const std::vector<ResidualPiece> expected = host_.residuals();
    const std::vector<ResidualPiece> found = other_.residuals();
    ASSERT_EQ(expected.size(), found.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(expected[i].tensor, found[i].tensor);
      EXPECT_TRUE(gradwire::same_bits(expected[i].values, found[i].values)) << found[i].tensor;
    }
  }
  void retract() {
    host_.retract();
    other_.retract();
    compare_residuals();
  }
  void scale(float factor) {
    host_.scale(factor);
    other_.scale(factor);
    compare_residuals();
  }

 private:
  uint32_t world_;
  std::shared_ptr<const Layout> layout_;
  Ranks host_;
  Ranks other_;
};

constexpr Place kHost = Place::kHost;
constexpr Place kDevice = Place::kDevice;
constexpr Place kOffloaded = Place::kOffloaded;

const char* const kCodecs[] = {"raw",
                               "fp16:ef=on",
                               "int8:bucket=100",
                               "3lc:s=1.75",
                               "3lc:coder=none",
                               "3lc:coder=rice,residual=bf16",
                               "onebit",
                               "topk:ratio=0.1",
                               "terngrad",
                               "stc:density=0.1",
                               "qsgd",
                               "qsgd:coder=elias,ef=on",
                               "inceptionn"};

class DeviceExchangeTest : public testing::TestWithParam<const char*> {};

TEST_P(DeviceExchangeTest, GivesTheBitsOfTheHost) {
  for (const std::vector<Place>& places :
       {std::vector<Place>{kDevice}, {kDevice, kHost}, {kOffloaded, kHost, kDevice}}) {
    SCOPED_TRACE(std::to_string(places.size()) + " ranks");
    Pair pair(make_of("sharded"), places, {.codec = GetParam()});
    for (uint64_t step = 0; step < 3; ++step) pair.step(pair.draw(step), step);
    pair.scale(0.3f);
    pair.retract();
    pair.step(pair.draw(9), 9);
  }
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, DeviceExchangeTest, testing::ValuesIn(kCodecs));

size_t free_memory() {
  size_t free = 0;
  size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

// Of the device, taken by rank 0 before its first step.
size_t memory_of_rank(Place place, const std::shared_ptr<const Layout>& layout) {
  const size_t before = free_memory();
  const Ranks rank(make_of("sharded"), layout, {place});
  return before - free_memory();
}

TEST(DeviceExchange, TakesNoMemoryOfTheDeviceForOffloadedResiduals) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"large", {4096, 1024}}}, 2, {.codec = "3lc"}).value());
  static_cast<void>(memory_of_rank(kDevice, layout));  // loads the kernels
  const size_t residuals = layout->numel() * sizeof(float);
  EXPECT_GE(memory_of_rank(kDevice, layout), residuals);
  EXPECT_LT(memory_of_rank(kOffloaded, layout), residuals / 4);
}

TEST(DeviceExchange, MayBeARing) {
  Pair pair(make_of("ring"), {kDevice, kHost, kDevice}, {.codec = "3lc:s=1.5"});
  for (uint64_t step = 0; step < 3; ++step) pair.step(pair.draw(step), step);
}

TEST(DeviceExchange, MayBeABroadcast) {
  for (const char* codec : {"qsgd", "3lc:s=1.5", "raw"}) {
    Pair pair(make_of("broadcast"), {kDevice, kHost, kDevice}, {.codec = codec});
    for (uint64_t step = 0; step < 3; ++step) pair.step(pair.draw(step), step);
    pair.scale(0.3f);
    pair.retract();
    Buckets buckets = pair.draw(8);
    buckets[2][5] = std::numeric_limits<float>::quiet_NaN();
    pair.step(buckets, 8);
    pair.retract();
    pair.step(pair.draw(9), 9);
  }
}

TEST(DeviceExchange, MayBeHierarchical) {
  const Make make = make_of("hierarchical:ranks=2");
  const auto layout =
      std::make_shared<const Layout>(Layout::create(small_tensors(), 2, {.codec = "int8"}).value());
  Buckets buckets = random_buckets(4, layout->numel(), 1);
  Buckets expected = buckets;
  Ranks host(make, layout, {kHost, kHost, kHost, kHost});
  Ranks mixed(make, layout, {kDevice, kHost, kHost, kDevice});
  ASSERT_TRUE(host.step(expected, 0).ok());
  ASSERT_TRUE(mixed.step(buckets, 0).ok());
  for (size_t r = 0; r < 4; ++r) EXPECT_TRUE(gradwire::same_bits(expected[r], buckets[r]));
}

TEST(DeviceExchange, SkipsNonFiniteSteps) {
  Pair pair(make_of("sharded"), {kDevice, kHost, kDevice}, {.codec = "3lc:s=1.75"});
  pair.step(pair.draw(0), 0);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    Buckets buckets = pair.draw(rank);
    buckets[rank][pair.numel() - 5] = std::numeric_limits<float>::infinity();
    pair.step(buckets, rank + 1);
    const auto& found = pair.other().rank(0).non_finite();
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->rank, rank);
    EXPECT_EQ(found->tensor, "b.weight");
    EXPECT_EQ(found->element, 100u * 47 - 5);
    pair.retract();
  }
  pair.step(pair.draw(7), 7);
}

TEST(DeviceExchange, MarksSumsWithTheResidualThatOverflow) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create(small_tensors(), 2, {.codec = "3lc:s=1.9"}).value());
  Ranks ranks(make_of("sharded"), layout, {kDevice, kDevice});
  Buckets buckets(2, std::vector<float>(layout->numel(), 3e38f));
  for (size_t i = 0; i < buckets[0].size(); i += 2) buckets[0][i] = -3e38f;
  for (uint64_t step = 0; step < 2; ++step) {
    Buckets copy = buckets;
    ASSERT_TRUE(ranks.step(copy, step).ok());
    EXPECT_TRUE(step == 0 || ranks.rank(0).non_finite().has_value());
  }
}

TEST(DeviceExchange, TakesResidualsFromOtherRanks) {
  const LayoutOptions options = {.codec = "int8:residual=bf16"};
  Pair three(make_of("sharded"), {kDevice, kHost, kDevice}, options);
  three.step(three.draw(0), 0);
  for (const std::vector<Place>& places : {std::vector<Place>{kDevice}, {kDevice, kDevice}}) {
    const auto world = static_cast<uint32_t>(places.size());
    const auto layout =
        std::make_shared<const Layout>(Layout::create(small_tensors(), world, options).value());
    Ranks host(make_of("sharded"), layout, std::vector<Place>(world, kHost));
    Ranks device(make_of("sharded"), layout, places);
    for (const ResidualPiece& piece : three.other().residuals()) {
      ASSERT_TRUE(host.rank(0).import_residual(piece).ok());
      ASSERT_TRUE(device.rank(0).import_residual(piece).ok());
    }
    Buckets expected = random_buckets(world, layout->numel(), 3);
    Buckets buckets = expected;
    ASSERT_TRUE(host.step(expected, 1).ok());
    ASSERT_TRUE(device.step(buckets, 1).ok());
    for (uint32_t r = 0; r < world; ++r) {
      EXPECT_TRUE(gradwire::same_bits(expected[r], buckets[r]));
    }
  }
}

TEST(DeviceExchange, FindsTheSameOutgrownResiduals) {
  for (const char* codec : {"topk:ratio=0.001", "topk:ratio=0.001,residual=bf16"}) {
    const auto layout = std::make_shared<const Layout>(
        Layout::create(small_tensors(), 2, {.codec = codec}).value());
    Ranks host(make_of("sharded"), layout, {kHost, kHost});
    Ranks device(make_of("sharded"), layout, {kDevice, kDevice});
    const ResidualPiece owed = {Direction::kPush, "b.weight", 0, std::vector<float>(4700, 1e6f)};
    ASSERT_TRUE(host.rank(0).import_residual(owed).ok());
    ASSERT_TRUE(device.rank(0).import_residual(owed).ok());
    for (uint64_t step = 0; step < 16; ++step) {
      Buckets expected = random_buckets(2, layout->numel(), step);
      Buckets buckets = expected;
      ASSERT_TRUE(host.step(expected, step).ok());
      ASSERT_TRUE(device.step(buckets, step).ok());
    }
    const std::vector<OutgrownResidual> expected = host.rank(0).outgrown_residuals();
    const std::vector<OutgrownResidual> found = device.rank(0).outgrown_residuals();
    ASSERT_FALSE(expected.empty());
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].tensor, "b.weight");
      EXPECT_EQ(found[i].direction, expected[i].direction);
      EXPECT_EQ(found[i].step, 15u);
      EXPECT_NEAR(found[i].factor / expected[i].factor, 1.0, 1e-12);
    }
  }
}

TEST(DeviceExchange, RefusesSharedScalesByName) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create(small_tensors(), 2, {.codec = "terngrad"}).value());
  const auto made = make_of("terngrad")(layout, 0, codecs_at(kDevice));
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("exchange terngrad"), std::string::npos);
  EXPECT_NE(made.status().message().find("take exchange sharded"), std::string::npos);
}

TEST(DeviceExchange, RefusesCorruptPayloads) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create(small_tensors(), 2, {.codec = "3lc:coder=none"}).value());
  const auto shards = std::make_shared<const Shards>(layout, 0, 7);
  const std::unique_ptr<ShardCodec> codec = codecs_at(kDevice)(shards).value();
  const DeviceArray<float> bucket(layout->numel());
  codec->begin({const_cast<DeviceArray<float>&>(bucket).data(), layout->numel()});
  std::vector<std::byte> payload(64, std::byte{0xff});
  Packet packet{.header = {.direction = Direction::kPull}};
  for (uint32_t i : shards->segments[1]) {
    packet.frames.push_back({.codec = {}, .n = shards->segment(i).n, .payload = payload});
  }
  const Packet* const packets[] = {&packet};
  EXPECT_EQ(codec->decode(1, packets, DecodeMode::kStore, {}).code(), StatusCode::kCorruptPayload);
}

}  // namespace
}  // namespace gradwire::cuda
