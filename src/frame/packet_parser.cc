#include <algorithm>
#include <string>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "frame/packet.h"
#include "frame/packet_layout.h"

namespace gradwire {
namespace {

using namespace packet_layout;

Status corrupt(const std::string& what) { return {StatusCode::kCorruptPayload, "packet: " + what}; }

// Reads fields from the front of the rest of a packet's body.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  [[nodiscard]] uint64_t left() const { return bytes_.size(); }

  // The next `size` bytes; the caller has checked left().
  std::span<const std::byte> take(uint64_t size) {
    const std::span<const std::byte> taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }

  // Reads LEB128 in its shortest form. false: it is cut off, over 64 bits, or padded.
  bool take_varint(uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (bytes_.empty()) return false;
      const auto byte = load_le<uint8_t>(take(1).data());
      const uint64_t bits = byte & 0x7f;
      if (shift == 63 && bits > 1) return false;
      value |= bits << shift;
      if (byte < 0x80) return byte != 0 || shift == 0;
    }
    return false;
  }

 private:
  std::span<const std::byte> bytes_;
};

Status read_codec_table(Reader& reader, size_t count, std::vector<WireCodec>& table) {
  if (reader.left() < count * kCodecEntrySize) {
    return {StatusCode::kTruncated, "packet: the codec table is cut off"};
  }
  for (size_t i = 0; i < count; ++i) {
    const std::byte* entry = reader.take(kCodecEntrySize).data();
    const WireCodec wire = {.id = load_le<uint8_t>(entry),
                            .param_a = load_le<uint16_t>(entry + 2),
                            .param_b = load_le<uint32_t>(entry + 4)};
    GW_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> codec, Codec::from_wire(wire));
    if (const auto dtype = load_le<uint8_t>(entry + 1); dtype != 0) {
      return {StatusCode::kUnsupportedDtype,
              "packet: dtype " + std::to_string(dtype) + "; this build reads 0 (float32)"};
    }
    if (std::find(table.begin(), table.end(), wire) != table.end()) {
      return corrupt("codec table entry " + std::to_string(i) + " repeats an earlier one");
    }
    table.push_back(wire);
  }
  return {};
}

Status read_frames(Reader& reader, uint32_t count, const std::vector<WireCodec>& table,
                   std::vector<PacketFrame>& frames) {
  if (reader.left() / kSmallestFrameEntry < count) {
    return {StatusCode::kTruncated, "packet: " + std::to_string(count) + " frames don't fit " +
                                        std::to_string(reader.left()) + " bytes"};
  }
  frames.resize(count);
  std::vector<uint64_t> sizes(count);
  for (uint32_t i = 0; i < count; ++i) {
    if (reader.left() == 0)
      return {StatusCode::kTruncated, "packet: the frame entries are cut off"};
    const auto index = load_le<uint8_t>(reader.take(1).data());
    if (index >= table.size() || !reader.take_varint(frames[i].n) ||
        !reader.take_varint(sizes[i])) {
      return corrupt("the entry of frame " + std::to_string(i) + " can't be read");
    }
    if (frames[i].n > kMaxNumel) {
      return {StatusCode::kLimitExceeded,
              "packet: frame " + std::to_string(i) + " has more values than the limit of 2^40"};
    }
    frames[i].codec = table[index];
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (reader.left() < sizes[i]) {
      return {StatusCode::kTruncated,
              "packet: the payload of frame " + std::to_string(i) + " is cut off"};
    }
    frames[i].payload = reader.take(sizes[i]);
    GW_RETURN_IF_ERROR(
        Codec::from_wire(frames[i].codec).value()->check_size(frames[i].n, sizes[i]));
  }
  return {};
}

}  // namespace

uint64_t read_layout_digest(std::span<const std::byte> bytes) {
  return bytes.size() < kPacketHeaderSize ? 0 : load_le<uint64_t>(bytes.data() + kDigestAt);
}

Result<Packet> parse_packet(std::span<const std::byte> bytes) {
  if (bytes.size() < kPacketHeaderSize) {
    return Status(StatusCode::kTruncated, "packet: " + std::to_string(bytes.size()) +
                                              " bytes are less than a header of 32");
  }
  const std::byte* header = bytes.data();
  if (!std::equal(std::begin(kMagic), std::end(kMagic), header)) {
    return Status(StatusCode::kBadMagic, "not a gradwire packet: it does not start with 'GP'");
  }
  if (const auto version = load_le<uint8_t>(header + kVersionAt); version != kVersion) {
    return Status(StatusCode::kUnsupportedVersion,
                  "packet: version " + std::to_string(version) + "; this build reads version 1");
  }
  const auto flags = load_le<uint8_t>(header + kFlagsAt);
  const auto direction = load_le<uint8_t>(header + kDirectionAt);
  if ((flags & ~kNonFiniteFlag) != 0) {
    return Status(StatusCode::kReservedBits, "packet: reserved flags are set");
  }
  if (direction > static_cast<uint8_t>(Direction::kPull)) {
    return Status(StatusCode::kReservedBits, "packet: direction " + std::to_string(direction) +
                                                 " is reserved; 0 is push, 1 is pull");
  }
  Packet packet;
  packet.checksum = load_le<uint32_t>(header + kChecksumAt);
  if (packet.checksum != checksum_of(bytes)) {
    return Status(StatusCode::kChecksumMismatch, "packet: the checksum does not match the content");
  }
  packet.header = {.direction = static_cast<Direction>(direction),
                   .source = load_le<uint16_t>(header + kSourceAt),
                   .step = load_le<uint64_t>(header + kStepAt),
                   .layout_digest = load_le<uint64_t>(header + kDigestAt)};
  const auto codec_count = load_le<uint8_t>(header + kCodecCountAt);
  const auto frame_count = load_le<uint32_t>(header + kFrameCountAt);
  Reader reader(bytes.subspan(kBodyAt));
  if ((flags & kNonFiniteFlag) != 0) {
    if (codec_count != 0 || frame_count != 0 || reader.left() != kOriginSize) {
      return corrupt("a non-finite marker holds its origin of 16 bytes and nothing else");
    }
    const std::byte* origin = reader.take(kOriginSize).data();
    packet.non_finite = NonFiniteOrigin{.rank = load_le<uint32_t>(origin),
                                        .segment = load_le<uint32_t>(origin + 4),
                                        .element = load_le<uint64_t>(origin + 8)};
    return packet;
  }
  std::vector<WireCodec> table;
  GW_RETURN_IF_ERROR(read_codec_table(reader, codec_count, table));
  GW_RETURN_IF_ERROR(read_frames(reader, frame_count, table, packet.frames));
  if (reader.left() != 0) {
    return Status(StatusCode::kTrailingBytes,
                  std::to_string(reader.left()) + " bytes follow the packet's last payload");
  }
  return packet;
}

}  // namespace gradwire
