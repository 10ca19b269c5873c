#include "frame/packet.h"

#include <vector>

#include "gtest/gtest.h"

namespace gradwire {
namespace {

const std::vector<std::string> kSpecs = {"3lc:s=1.75", "raw", "3lc:s=1.75", "bf16"};

std::vector<PacketWriter::Segment> segments() {
  std::vector<PacketWriter::Segment> all;
  for (size_t i = 0; i < kSpecs.size(); ++i) {
    all.push_back({Codec::parse(kSpecs[i]).value(), 10 + 130 * i});
  }
  return all;
}

std::vector<float> values(size_t i) {
  std::vector<float> x(10 + 130 * i);
  for (size_t k = 0; k < x.size(); ++k) x[k] = static_cast<float>(k % 7) - 3.0f;
  return x;
}

const PacketHeader kHeader = {
    .direction = Direction::kPull, .source = 300, .step = 1ull << 40, .layout_digest = 77};

std::vector<std::byte> make_packet(PacketWriter& writer) {
  Execution execution = Execution::create().value();
  writer.begin(kHeader);
  for (size_t i = 0; i < kSpecs.size(); ++i) {
    EXPECT_TRUE(writer.add(values(i), {}, {}, execution).ok());
  }
  const std::span<const std::byte> packet = writer.finish();
  return {packet.begin(), packet.end()};
}

TEST(Packet, HoldsItsFrames) {
  PacketWriter writer = PacketWriter::create(segments()).value();
  const std::vector<std::byte> first = make_packet(writer);
  const std::vector<std::byte> bytes = make_packet(writer);
  EXPECT_EQ(first, bytes);
  const Packet packet = parse_packet(bytes).value();
  EXPECT_EQ(packet.header.direction, kHeader.direction);
  EXPECT_EQ(packet.header.source, kHeader.source);
  EXPECT_EQ(packet.header.step, kHeader.step);
  EXPECT_EQ(packet.header.layout_digest, kHeader.layout_digest);
  ASSERT_EQ(packet.frames.size(), kSpecs.size());
  Execution execution = Execution::create().value();
  for (size_t i = 0; i < kSpecs.size(); ++i) {
    const auto codec = Codec::parse(kSpecs[i]).value();
    EXPECT_EQ(packet.frames[i].codec, codec->wire());
    const std::vector<float> x = values(i);
    std::vector<std::byte> payload(codec->max_payload_size(x.size()));
    payload.resize(codec->encode(x, {}, {}, payload, execution).value());
    EXPECT_TRUE(std::ranges::equal(packet.frames[i].payload, payload));
  }
}

// spec/format.md: a packet of many small tensors takes at most 8 bytes per tensor beside the
// payloads.
TEST(Packet, CostsAtMostEightBytesATensor) {
  std::vector<PacketWriter::Segment> many(1000, {Codec::parse("raw").value(), 2000});
  PacketWriter writer = PacketWriter::create(many).value();
  Execution execution = Execution::create().value();
  writer.begin(kHeader);
  const std::vector<float> x(2000, 1.0f);
  for (size_t i = 0; i < many.size(); ++i) ASSERT_TRUE(writer.add(x, {}, {}, execution).ok());
  const uint64_t overhead = writer.finish().size() - many.size() * 2000 * sizeof(float);
  EXPECT_LE(overhead, kPacketHeaderSize + 8 + 8 * many.size());
}

TEST(Packet, TruncationsAndFlippedBitsAreRefused) {
  PacketWriter writer = PacketWriter::create(segments()).value();
  std::vector<std::byte> bytes = make_packet(writer);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(parse_packet(std::span(bytes).first(size)).ok()) << size;
  }
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(parse_packet(bytes).ok()) << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(Packet, NonFiniteMarkerTellsTheOrigin) {
  PacketWriter writer = PacketWriter::create(segments()).value();
  Execution execution = Execution::create().value();
  writer.begin(kHeader);
  ASSERT_TRUE(writer.add(values(0), {}, {}, execution).ok());
  const Packet packet =
      parse_packet(writer.finish_non_finite({.rank = 3, .segment = 2, .element = 1ull << 33}))
          .value();
  ASSERT_TRUE(packet.non_finite.has_value());
  EXPECT_EQ(packet.non_finite->rank, 3u);
  EXPECT_EQ(packet.non_finite->segment, 2u);
  EXPECT_EQ(packet.non_finite->element, 1ull << 33);
  EXPECT_TRUE(packet.frames.empty());
}

TEST(Packet, MayBeEmpty) {
  PacketWriter writer = PacketWriter::create({}).value();
  writer.begin(kHeader);
  EXPECT_EQ(writer.finish().size(), kPacketHeaderSize);
  EXPECT_TRUE(parse_packet(writer.finish()).ok());
}

}  // namespace
}  // namespace gradwire
