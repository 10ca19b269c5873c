#include <algorithm>
#include <cassert>
#include <limits>
#include <string>

#include "base/checksum.h"
#include "base/endian.h"
#include "base/return_if_error.h"
#include "frame/packet.h"
#include "frame/packet_layout.h"

namespace gradwire {
namespace {

std::byte* write_varint(std::byte* dst, uint64_t value) {
  while (value >= 0x80) {
    *dst++ = static_cast<std::byte>(value | 0x80);
    value >>= 7;
  }
  *dst++ = static_cast<std::byte>(value);
  return dst;
}

uint64_t varint_size(uint64_t value) {
  uint64_t size = 1;
  while (value >>= 7) ++size;
  return size;
}

// Bytes of a frame's entry in the header.
uint64_t entry_size(uint64_t n, uint64_t payload_size) {
  return 1 + varint_size(n) + varint_size(payload_size);
}

void write_header(std::span<std::byte> packet, const PacketHeader& header, uint8_t flags,
                  uint8_t codec_count, uint32_t frame_count) {
  using namespace packet_layout;
  std::byte* dst = packet.data();
  std::copy(std::begin(kMagic), std::end(kMagic), dst);
  store_le(dst + kVersionAt, kVersion);
  store_le(dst + kFlagsAt, flags);
  store_le(dst + kDirectionAt, static_cast<uint8_t>(header.direction));
  store_le(dst + kCodecCountAt, codec_count);
  store_le(dst + kSourceAt, header.source);
  store_le(dst + kStepAt, header.step);
  store_le(dst + kDigestAt, header.layout_digest);
  store_le(dst + kFrameCountAt, frame_count);
  store_le(dst + kChecksumAt, checksum_of(packet));
}

}  // namespace

uint64_t PacketWriter::max_size(std::span<const Segment> segments) noexcept {
  uint64_t size = kPacketHeaderSize;
  for (const Segment& segment : segments) {
    const uint64_t largest = segment.codec->max_payload_size(segment.n);
    // Each segment may have a codec of its own.
    size += packet_layout::kCodecEntrySize + entry_size(segment.n, largest) + largest;
  }
  return std::max<uint64_t>(size, kPacketHeaderSize + packet_layout::kOriginSize);
}

Result<PacketWriter> PacketWriter::create(std::vector<Segment> segments) {
  PacketWriter writer;
  if (segments.size() > std::numeric_limits<uint32_t>::max()) {
    return Status(StatusCode::kLimitExceeded, "a packet holds at most 2^32 - 1 frames");
  }
  uint64_t entries_size = 0;
  uint64_t payloads_size = 0;
  for (const Segment& segment : segments) {
    const WireCodec wire = segment.codec->wire();
    const auto known = std::find(writer.codec_table_.begin(), writer.codec_table_.end(), wire);
    const auto index = static_cast<size_t>(known - writer.codec_table_.begin());
    if (known == writer.codec_table_.end()) writer.codec_table_.push_back(wire);
    if (writer.codec_table_.size() > std::numeric_limits<uint8_t>::max()) {
      return Status(StatusCode::kLimitExceeded, "a packet holds at most 255 different codecs");
    }
    writer.codec_index_.push_back(static_cast<uint8_t>(index));
    const uint64_t largest = segment.codec->max_payload_size(segment.n);
    entries_size += entry_size(segment.n, largest);
    payloads_size += largest;
  }
  writer.payloads_begin_ = kPacketHeaderSize +
                           writer.codec_table_.size() * packet_layout::kCodecEntrySize +
                           entries_size;
  writer.buffer_size_ = writer.payloads_begin_ + payloads_size;
  writer.buffer_ = std::make_unique_for_overwrite<std::byte[]>(writer.buffer_size_);
  writer.marker_.resize(kPacketHeaderSize + packet_layout::kOriginSize);
  writer.segments_ = std::move(segments);
  return writer;
}

void PacketWriter::begin(const PacketHeader& header) {
  header_ = header;
  restart();
}

void PacketWriter::restart() noexcept {
  frames_.clear();
  payloads_end_ = payloads_begin_;
}

Status PacketWriter::add(const InputView& x, const ResidualView& residual, const DrawContext& draw,
                         Execution& execution) {
  const Segment& segment = segments_[frames_.size()];
  assert(x.size() == segment.n);
  return add_encoded([&](std::span<std::byte> payload) {
    return segment.codec->encode(x, residual, draw, payload, execution);
  });
}

Status PacketWriter::add_encoded(
    const std::function<Result<uint64_t>(std::span<std::byte> payload)>& encode) {
  const Segment& segment = segments_[frames_.size()];
  GW_ASSIGN_OR_RETURN(
      uint64_t size,
      encode(buffer().subspan(payloads_end_, segment.codec->max_payload_size(segment.n))));
  frames_.push_back({.codec = codec_table_[codec_index_[frames_.size()]],
                     .n = segment.n,
                     .payload = buffer().subspan(payloads_end_, size)});
  payloads_end_ += size;
  return {};
}

// The size of the header's entries is known only now. So it is written directly before the
// payloads, which stay where they were encoded.
std::span<const std::byte> PacketWriter::finish() {
  assert(frames_.size() == segments_.size());
  using namespace packet_layout;
  uint64_t front = kPacketHeaderSize + codec_table_.size() * kCodecEntrySize;
  for (const PacketFrame& frame : frames_) {
    front += entry_size(frame.n, frame.payload.size());
  }
  const uint64_t begin = payloads_begin_ - front;
  std::byte* dst = buffer_.get() + begin + kPacketHeaderSize;
  for (const WireCodec& wire : codec_table_) {
    store_le(dst, wire.id);
    store_le(dst + 1, static_cast<uint8_t>(Dtype::kFloat32));
    store_le(dst + 2, wire.param_a);
    store_le(dst + 4, wire.param_b);
    dst += kCodecEntrySize;
  }
  for (size_t i = 0; i < frames_.size(); ++i) {
    store_le(dst++, codec_index_[i]);
    dst = write_varint(dst, frames_[i].n);
    dst = write_varint(dst, frames_[i].payload.size());
  }
  const std::span<std::byte> packet = buffer().subspan(begin, payloads_end_ - begin);
  write_header(packet, header_, 0, static_cast<uint8_t>(codec_table_.size()),
               static_cast<uint32_t>(segments_.size()));
  return packet;
}

std::span<const std::byte> PacketWriter::finish_non_finite(const NonFiniteOrigin& origin) {
  using namespace packet_layout;
  restart();
  const std::span<std::byte> packet(marker_);
  std::byte* dst = packet.data() + kPacketHeaderSize;
  store_le(dst, origin.rank);
  store_le(dst + 4, origin.segment);
  store_le(dst + 8, origin.element);
  write_header(packet, header_, kNonFiniteFlag, 0, 0);
  return packet;
}

}  // namespace gradwire
