#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/execution.h"

namespace gradwire::fuzzing {

// Unless `condition` holds, ends the process, so that libFuzzer keeps the input.
void require(bool condition, std::string_view what);

// Every SIMD target of this CPU, including "scalar", with one thread and with two. They are made
// once.
[[nodiscard]] std::vector<Execution>& executions();

[[nodiscard]] bool same_bits(std::span<const float> a, std::span<const float> b);

// A copy of `data` in memory of exactly its size, so that AddressSanitizer sees a read past its
// end.
[[nodiscard]] std::vector<std::byte> exact_copy(std::span<const uint8_t> data);

// Reads an input as a list of choices. When the input is at its end, all choices are 0.
class ChoiceReader {
 public:
  explicit ChoiceReader(std::span<const uint8_t> data) : rest_(data) {}

  [[nodiscard]] bool at_end() const { return rest_.empty(); }
  // A number below `limit`, from the next 1, 2 or 8 bytes.
  uint8_t below(uint8_t limit) { return static_cast<uint8_t>(read<uint8_t>() % limit); }
  uint16_t word() { return read<uint16_t>(); }
  uint64_t number() { return read<uint64_t>(); }
  bool yes() { return (read<uint8_t>() & 1) != 0; }
  template <typename T, size_t count>
  const T& of(const T (&values)[count]) {
    return values[read<uint8_t>() % count];
  }
  // The next bytes, at most `most`.
  std::span<const uint8_t> bytes(size_t most) {
    const auto taken = rest_.first(std::min(most, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

 private:
  template <typename T>
  T read() {
    T value = 0;
    const auto taken = bytes(sizeof value);
    if (!taken.empty()) std::memcpy(&value, taken.data(), taken.size());
    return value;
  }

  std::span<const uint8_t> rest_;
};

// Gives a frame or packet of any bytes the right magic, version and checksum, and a frame the right
// length, so that a fuzzer gets past these checks. Shorter bytes stay as they are.
void repair_frame(std::span<std::byte> frame);
void repair_packet(std::span<std::byte> packet);

// Larger tensors are skipped: they only cost time.
inline constexpr uint64_t kMaxFuzzedNumel = 1 << 17;

// Stores and adds the values of a payload with every execution. All must agree in the status and,
// if it is ok, in every bit.
void check_decoders(const Codec& codec, std::span<const std::byte> payload, uint64_t n);

}  // namespace gradwire::fuzzing
