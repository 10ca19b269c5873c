// Decodes any bytes as a packet: as they are, and then with correct magic, version and checksum, so
// that the fuzzer gets past these checks.

#include "frame/packet.h"
#include "fuzzing.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

void check(std::span<const std::byte> bytes) {
  const Result<Packet> packet = parse_packet(bytes);
  if (!packet.ok()) {
    require(!packet.status().message().empty(), "a refusal without a message");
    return;
  }
  uint64_t numel = 0;
  for (const PacketFrame& frame : packet.value().frames) {
    require(frame.payload.size() <= bytes.size(), "a payload is longer than its packet");
    if (frame.n > kMaxFuzzedNumel - numel) return;
    numel += frame.n;
    const auto codec = Codec::from_wire(frame.codec);
    require(codec.ok(), "a packet was parsed with a codec that there is not");
    check_decoders(*codec.value(), frame.payload, frame.n);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes = exact_copy({data, size});
  check(bytes);
  repair_packet(bytes);
  check(bytes);
  return 0;
}
