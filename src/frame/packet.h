#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/private_export.h"
#include "gradwire/codec.h"
#include "gradwire/direction.h"
#include "gradwire/execution.h"
#include "gradwire/status.h"

namespace gradwire {

// A packet holds the frames that one rank sends to another in one step, with a compact header for
// each (spec/format.md).
inline constexpr uint64_t kPacketHeaderSize = 32;

// The place of the NaN or Inf that was found first.
struct NonFiniteOrigin {
  uint32_t rank = 0;
  uint32_t segment = 0;  // index in the layout
  uint64_t element = 0;  // index in the segment
};

struct PacketHeader {
  Direction direction = Direction::kPush;
  uint16_t source = 0;  // the sending rank
  uint64_t step = 0;
  uint64_t layout_digest = 0;
};

struct PacketFrame {
  WireCodec codec;
  uint64_t n = 0;
  std::span<const std::byte> payload;  // inside the bytes that were parsed
};

struct Packet {
  PacketHeader header;
  uint32_t checksum = 0;
  std::optional<NonFiniteOrigin> non_finite = {};  // if set, there are no frames
  std::vector<PacketFrame> frames = {};
};

// Checks everything but the payloads' content, in the order of spec/format.md. It allocates no more
// memory than the bytes at hand justify.
Result<Packet> parse_packet(std::span<const std::byte> bytes);

// The layout digest in the header, unchecked; 0 if the bytes are too few.
uint64_t read_layout_digest(std::span<const std::byte> bytes);

// Writes packets with the same segments step after step, into memory that is allocated once.
class PacketWriter {
 public:
  struct Segment {
    std::shared_ptr<const Codec> codec;
    uint64_t n;
  };

  // The most bytes of a packet of these segments; a marker is no longer.
  [[nodiscard]] static uint64_t max_size(std::span<const Segment> segments) noexcept;

  // kLimitExceeded: more than 255 different codecs, or more frames than a packet holds.
  static Result<PacketWriter> create(std::vector<Segment> segments);

  void begin(const PacketHeader& header);
  // Encodes the next segment. Fails as Codec::encode does.
  Status add(const InputView& x, const ResidualView& residual, const DrawContext& draw,
             Execution& execution);
  // The same with the caller's own encoder: `encode` gets room for the payload and returns the size
  // that it used.
  GW_PRIVATE_EXPORT Status
  add_encoded(const std::function<Result<uint64_t>(std::span<std::byte> payload)>& encode);
  // Drops the frames that were added since begin.
  void restart() noexcept;
  // The frames that were added since begin, as parse_packet would give them. Valid until the next
  // begin.
  [[nodiscard]] Packet packet() const { return {.header = header_, .frames = frames_}; }
  // The packet, once every segment has been added. Valid until the next begin.
  [[nodiscard]] std::span<const std::byte> finish();
  // A marker: the packet for a step whose input is not finite. All added frames are dropped.
  [[nodiscard]] std::span<const std::byte> finish_non_finite(const NonFiniteOrigin& origin);

 private:
  PacketWriter() = default;
  [[nodiscard]] std::span<std::byte> buffer() const { return {buffer_.get(), buffer_size_}; }

  std::vector<Segment> segments_;
  std::vector<WireCodec> codec_table_;
  std::vector<uint8_t> codec_index_;  // of each segment
  std::vector<PacketFrame> frames_;   // added so far
  // Not filled: what no frame reaches takes no memory of the system. Encoded frames are mostly far
  // smaller than the most that they may take.
  std::unique_ptr<std::byte[]> buffer_;
  uint64_t buffer_size_ = 0;
  std::vector<std::byte> marker_;
  uint64_t payloads_begin_ = 0;  // room for the largest header before the payloads
  uint64_t payloads_end_ = 0;
  PacketHeader header_;
};

}  // namespace gradwire
