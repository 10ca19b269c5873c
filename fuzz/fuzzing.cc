#include "fuzzing.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/checksum.h"
#include "base/endian.h"
#include "frame/packet.h"
#include "gradwire/frame.h"

namespace gradwire::fuzzing {

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

void require(bool condition, std::string_view what) {
  if (condition) return;
  std::fprintf(stderr, "fuzzing: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

std::vector<Execution>& executions() {
  static std::vector<Execution> all = [] {
    std::vector<Execution> made;
    for (const std::string_view target : simd_targets()) {
      for (const int threads : {1, 2}) {
        Result<Execution> execution = Execution::create(target, threads, Threading::kAlways);
        require(execution.ok(), "a listed SIMD target can't be used");
        made.push_back(std::move(execution).value());
      }
    }
    return made;
  }();
  return all;
}

std::vector<std::byte> exact_copy(std::span<const uint8_t> data) {
  std::vector<std::byte> copy(data.size());
  if (!data.empty()) std::memcpy(copy.data(), data.data(), data.size());
  copy.shrink_to_fit();
  return copy;
}

void repair_frame(std::span<std::byte> frame) {
  if (frame.size() < kFrameHeaderSize) return;
  std::memcpy(frame.data(), "GW\1", 3);
  store_le(frame.data() + 24, uint64_t{frame.size() - kFrameHeaderSize});
  store_le(frame.data() + 20, checksum32(frame.first(20), frame.subspan(24)));
}

void repair_packet(std::span<std::byte> packet) {
  if (packet.size() < kPacketHeaderSize) return;
  std::memcpy(packet.data(), "GP\1", 3);
  store_le(packet.data() + 28, checksum32(packet.first(28), packet.subspan(kPacketHeaderSize)));
}

void check_decoders(const Codec& codec, std::span<const std::byte> payload, uint64_t n) {
  std::vector<float> first_stored;
  std::vector<float> first_sum;
  StatusCode first_code = StatusCode::kOk;
  bool first = true;
  for (Execution& execution : executions()) {
    std::vector<float> stored(n);
    std::vector<float> sum(n, 1.0f);
    const StatusCode code = codec.decode(payload, stored, DecodeMode::kStore, execution).code();
    const StatusCode sum_code = codec.decode(payload, sum, DecodeMode::kAdd, execution).code();
    require(code == StatusCode::kOk || code == StatusCode::kCorruptPayload, "unexpected status");
    require(code == sum_code, "storing and adding differ in their status");
    if (first) {
      first_stored = std::move(stored);
      first_sum = std::move(sum);
      first_code = code;
      first = false;
      continue;
    }
    require(code == first_code, "two targets differ in their status");
    if (code != StatusCode::kOk) continue;
    require(same_bits(stored, first_stored), "two targets decode other values");
    require(same_bits(sum, first_sum), "two targets decode other sums");
  }
}

}  // namespace gradwire::fuzzing
