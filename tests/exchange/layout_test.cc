#include "gradwire/layout.h"

#include <set>

#include "gtest/gtest.h"

namespace gradwire {
namespace {

const std::vector<TensorInfo> kTensors = {
    {"conv.weight", {64, 64, 3, 3}}, {"conv.bias", {64}}, {"fc.weight", {200, 100}},
    {"tiny.weight", {5, 5}},         {"empty", {0, 7}},   {"last.weight", {10, 84}}};

Layout make(uint32_t world, const LayoutOptions& options = {}) {
  return Layout::create(kTensors, world, options).value();
}

TEST(Layout, SegmentsCoverTheBucketOnceInOrderOfTheirOwners) {
  for (uint32_t world : {1u, 2u, 3u, 4u, 7u, 16u, 32u, 1000u}) {
    const Layout layout = make(world);
    uint64_t position = 0;
    uint32_t owner = 0;
    for (const Segment& segment : layout.segments()) {
      EXPECT_EQ(segment.bucket_offset, position);
      EXPECT_GT(segment.n, 0u);
      EXPECT_GE(segment.owner, owner);
      EXPECT_LT(segment.owner, world);
      owner = segment.owner;
      position += segment.n;
    }
    EXPECT_EQ(position, layout.numel());
  }
}

TEST(Layout, SharesAreBalancedAndSmallTensorsWhole) {
  const Layout layout = make(4);
  std::vector<uint64_t> shares(4);
  for (const Segment& segment : layout.segments()) {
    shares[segment.owner] += segment.n;
    if (segment.n < 4096) {
      EXPECT_EQ(segment.n, kTensors[segment.tensor].numel());
    }
  }
  for (uint64_t share : shares) {
    EXPECT_GT(share, layout.numel() / 4 - 4096);
    EXPECT_LT(share, layout.numel() / 4 + 4096);
  }
}

TEST(Layout, RowsAreCutAsFsdpShardsThem) {
  for (uint32_t world : {1u, 2u, 3u, 4u, 7u, 1000u}) {
    const Layout layout = make(world, {.cut = Cut::kRows});
    uint64_t shard = 0;  // values of a shard, with padding
    for (const TensorInfo& tensor : kTensors) {
      const uint64_t rows = (tensor.dims[0] + world - 1) / world;
      shard += tensor.dims[0] == 0 ? 0 : rows * (tensor.numel() / tensor.dims[0]);
    }
    EXPECT_EQ(layout.numel(), world * shard);
    std::vector<uint64_t> covered(kTensors.size());
    for (const Segment& segment : layout.segments()) {
      const TensorInfo& tensor = kTensors[segment.tensor];
      const uint64_t row = tensor.numel() / tensor.dims[0];
      EXPECT_EQ(segment.bucket_offset / shard, segment.owner);
      EXPECT_EQ(segment.tensor_offset,
                segment.owner * ((tensor.dims[0] + world - 1) / world) * row);
      covered[segment.tensor] += segment.n;
    }
    for (size_t t = 0; t < kTensors.size(); ++t) EXPECT_EQ(covered[t], kTensors[t].numel());
  }
  // The padding of 5 rows on 2 ranks is at the end of the piece of rank 1.
  const Layout layout = Layout::create({{"a", {5, 2}}, {"b", {2}}}, 2, {.cut = Cut::kRows}).value();
  ASSERT_EQ(layout.segments().size(), 4u);
  const uint64_t places[][3] = {{0, 6, 0}, {6, 1, 0}, {7, 4, 1}, {13, 1, 1}};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(layout.segments()[i].bucket_offset, places[i][0]);
    EXPECT_EQ(layout.segments()[i].n, places[i][1]);
    EXPECT_EQ(layout.segments()[i].owner, places[i][2]);
  }
  EXPECT_NE(make(2).describe(), make(2, {.cut = Cut::kRows}).describe());
}

TEST(Layout, RowsNeedADimensionAndNoServers) {
  const auto code = [](const std::vector<TensorInfo>& tensors, const LayoutOptions& options) {
    return Layout::create(tensors, 4, options).status().code();
  };
  EXPECT_EQ(code({{"scalar", {}}}, {.cut = Cut::kRows}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kTensors, {.servers = 1, .cut = Cut::kRows}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kTensors, {.cut = Cut::kRows, .owner = 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({{"huge", {uint64_t{1} << 63, 2}}}, {.cut = Cut::kRows}),
            StatusCode::kLimitExceeded);
  EXPECT_EQ(code({{"padded to 2^64", {~uint64_t{0}, 1}}}, {.cut = Cut::kRows}),
            StatusCode::kLimitExceeded);
}

TEST(Layout, WithoutOwnersTensorsAreWholeAndOneShard) {
  for (uint32_t world : {1u, 2u, 4u}) {
    const Layout owned = make(world);
    const Layout layout = owned.without_owners();
    EXPECT_EQ(owned.shards(), world);
    EXPECT_EQ(layout.shards(), world + 1);
    EXPECT_EQ(layout.world_size(), world);
    EXPECT_EQ(layout.numel(), owned.numel());
    uint64_t position = 0;
    for (const Segment& segment : layout.segments()) {
      EXPECT_EQ(segment.owner, world);
      EXPECT_EQ(segment.bucket_offset, position);
      EXPECT_EQ(segment.n, kTensors[segment.tensor].numel());
      position += segment.n;
    }
    EXPECT_EQ(position, layout.numel());
    EXPECT_NE(layout.describe(), owned.describe());
  }
}

TEST(Layout, ServersOwnWholeTensorsBalancedBySize) {
  for (uint32_t servers : {1u, 2u, 3u, 8u}) {
    const Layout layout = make(4 + servers, {.servers = servers});
    EXPECT_EQ(layout.workers(), 4u);
    std::vector<uint64_t> shares(4 + servers);
    for (const Segment& segment : layout.segments()) {
      EXPECT_EQ(segment.n, kTensors[segment.tensor].numel());
      shares[segment.owner] += segment.n;
    }
    for (uint32_t worker = 0; worker < 4; ++worker) EXPECT_EQ(shares[worker], 0u);
    if (servers != 2) continue;
    EXPECT_EQ(shares[4], 36864u);  // the largest tensor alone outweighs all others
    EXPECT_EQ(shares[5], layout.numel() - shares[4]);
  }
  EXPECT_EQ(Layout::create(kTensors, 2, {.servers = 2}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(Layout, DefaultRulesSendSmallAndFlatTensorsRaw) {
  const Layout layout = make(1);
  for (const Segment& segment : layout.segments()) {
    const std::string& name = kTensors[segment.tensor].name;
    const bool raw = name == "conv.bias" || name == "tiny.weight";
    EXPECT_EQ(segment.push_codec->text(), raw ? "raw" : "3lc:s=1") << name;
    EXPECT_EQ(segment.raw_reason.empty(), !raw) << name;
  }
}

TEST(Layout, AnotherCodecStandsForRawWhereverItIsChosen) {
  LayoutOptions options;
  options.pull_codec = "raw";
  options.rules = {{"fc.*", "raw", Direction::kPush}};
  options.raw_codec = "fp16";
  const Layout layout = make(1, options);
  for (const Segment& segment : layout.segments()) {
    const std::string& name = kTensors[segment.tensor].name;
    const bool raw = name == "conv.bias" || name == "tiny.weight" || name == "fc.weight";
    EXPECT_EQ(segment.push_codec->text(), raw ? "fp16" : "3lc:s=1") << name;
    EXPECT_EQ(segment.pull_codec->text(), "fp16") << name;
    EXPECT_EQ(segment.raw_reason.empty(), !raw) << name;
  }
  EXPECT_NE(layout.describe().find("\nraw is fp16\n"), std::string::npos);
  EXPECT_EQ(make(1).describe().find("raw is"), std::string::npos);
  options.raw_codec = "fp61";
  EXPECT_EQ(Layout::create(kTensors, 2, options).status().code(), StatusCode::kUnknownCodec);
}

TEST(Layout, RulesComeFirstThenExclusions) {
  LayoutOptions options;
  options.codec = "3lc:s=1.75";
  options.pull_codec = "3lc:s=1";
  options.exclude = {"last.*"};
  options.rules = {{"conv.bias", "bf16", std::nullopt}, {"fc.*", "raw", Direction::kPull}};
  const Layout layout = make(1, options);
  for (const Segment& segment : layout.segments()) {
    const std::string& name = kTensors[segment.tensor].name;
    const std::string push = segment.push_codec->text();
    const std::string pull = segment.pull_codec->text();
    if (name == "conv.weight") {
      EXPECT_EQ(push + " " + pull, "3lc:s=1.75 3lc:s=1");
    }
    if (name == "conv.bias") {
      EXPECT_EQ(push + " " + pull, "bf16 bf16");
    }
    if (name == "fc.weight") {
      EXPECT_EQ(push + " " + pull, "3lc:s=1.75 raw");
    }
    if (name == "last.weight") {
      EXPECT_EQ(push + " " + pull, "raw raw");
      EXPECT_EQ(segment.raw_reason, "excluded by 'last.*'");
    }
  }
}

TEST(Layout, NamesPatternsThatMatchNothing) {
  LayoutOptions options;
  options.rules = {{"fc.*", "raw"}, {"cf.*", "raw"}};
  options.exclude = {"conv.bias", "*.biass"};
  EXPECT_EQ(make(2, options).unmatched(), (std::vector<std::string>{"*.biass", "cf.*"}));
  EXPECT_TRUE(make(2).unmatched().empty());
}

TEST(Layout, RefusesWhatNoRankCouldUse) {
  LayoutOptions options;
  options.codec = "4lc";
  EXPECT_EQ(Layout::create(kTensors, 2, options).status().code(), StatusCode::kUnknownCodec);
  options.codec = "3lc";
  options.rules = {{"nothing-matches", "3lc:s=9", std::nullopt}};
  EXPECT_EQ(Layout::create(kTensors, 2, options).status().code(), StatusCode::kBadParameter);
  EXPECT_EQ(Layout::create(kTensors, 0, {}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Layout::create(kTensors, 65536, {}).status().code(), StatusCode::kInvalidArgument);
}

TEST(Layout, RefusesTwoTensorsOfOneName) {
  for (const char* name : {"a", ""}) {
    for (const LayoutOptions& options :
         {LayoutOptions{}, LayoutOptions{.servers = 1}, LayoutOptions{.cut = Cut::kRows}}) {
      const std::vector<TensorInfo> tensors = {{name, {5, 2}}, {"b", {3}}, {name, {0}}};
      const Status status = Layout::create(tensors, 2, options).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message(),
                "two tensors have the name '" + std::string(name) + "'; give each its own");
      EXPECT_TRUE(Layout::create({tensors[0], tensors[1]}, 2, options).ok());
    }
  }
}

TEST(Layout, DescriptionsDifferWhereLayoutsDo) {
  std::set<std::string> seen;
  EXPECT_TRUE(seen.insert(make(2).describe()).second);
  EXPECT_FALSE(seen.insert(make(2).describe()).second);
  EXPECT_TRUE(seen.insert(make(3).describe()).second);
  LayoutOptions options;
  options.codec = "3lc:s=1.5";
  EXPECT_TRUE(seen.insert(make(2, options).describe()).second);
  options = {};
  options.min_numel = 10;
  EXPECT_TRUE(seen.insert(make(2, options).describe()).second);
  EXPECT_TRUE(seen.insert(make(3, {.servers = 1}).describe()).second);
  EXPECT_TRUE(seen.insert(make(3, {.servers = 2}).describe()).second);
}

}  // namespace
}  // namespace gradwire
