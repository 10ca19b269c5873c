// Makes the delta of two arrays with every SIMD target, with one thread and two: all must give the
// same bytes, and the result.
//
// Input: 8 bytes of choices, then bytes. The first half of these, repeated, is the base; the second
// half, repeated, is the result, or steps from the base to it, with rows of zeros between them.

#include <cstring>

#include "base/endian.h"
#include "fuzzing.h"
#include "gradwire/delta.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

constexpr size_t kChoicesSize = 8;

struct Choices {
  DeltaElement element;
  bool adds;      // whether the second half is added to the base
  uint64_t rows;  // zeros after each repetition of what is added
  size_t shift;   // of the arrays from an aligned address
  uint64_t n;
};

Choices read_choices(const std::byte* bytes) {
  constexpr DeltaElement kElements[] = {DeltaElement::kInteger8,  DeltaElement::kInteger16,
                                        DeltaElement::kInteger32, DeltaElement::kFloat8,
                                        DeltaElement::kFloat16,   DeltaElement::kFloat32};
  const auto flags = load_le<uint8_t>(bytes);
  // One input in sixteen is long: several chunks cost time.
  const auto n = load_le<uint32_t>(bytes + 4);
  return {kElements[flags % 6], flags >= 128, load_le<uint16_t>(bytes + 2),
          load_le<uint8_t>(bytes + 1) % 4u, n % (n >> 28 == 15 ? 2 * kMaxFuzzedNumel : 4096)};
}

// `size` bytes: `part`, then `zeros` zeros, and so on.
std::vector<std::byte> repeat(std::span<const std::byte> part, uint64_t zeros, uint64_t size) {
  std::vector<std::byte> bytes(size);
  if (part.empty()) return bytes;
  for (uint64_t at = 0; at < size; at += part.size() + zeros) {
    std::memcpy(bytes.data() + at, part.data(), std::min<uint64_t>(part.size(), size - at));
  }
  return bytes;
}

std::vector<std::byte> encode(const Choices& choices, const std::vector<std::byte>& base,
                              const std::vector<std::byte>& result, DeltaBase follow,
                              Execution& execution) {
  // The copy of the base ends with its memory.
  std::vector<std::byte> memory(choices.shift + base.size());
  const auto copy = std::span(memory).subspan(choices.shift);
  std::ranges::copy(base, copy.begin());
  std::vector<std::byte> delta(max_delta_size(choices.element, choices.n));
  const auto written = encode_delta(choices.element, copy, result, follow, delta, execution);
  require(written.ok(), "two arrays of the same length have no delta");
  require(std::ranges::equal(copy, follow == DeltaBase::kFollow ? result : base),
          "the copy of the base is not what was asked for");
  require(written.value().base_digest == digest_array(base, execution) &&
              written.value().result_digest == digest_array(result, execution),
          "a digest is wrong");
  delta.resize(written.value().size);
  return delta;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kChoicesSize) return 0;
  const std::vector<std::byte> bytes = exact_copy({data, size});
  const Choices choices = read_choices(bytes.data());
  const std::span<const std::byte> rest = std::span(bytes).subspan(kChoicesSize);
  const uint64_t all = choices.n * width_of(choices.element);
  const std::vector<std::byte> base = repeat(rest.first(rest.size() / 2), 0, all);
  std::vector<std::byte> result = repeat(rest.subspan(rest.size() / 2), choices.rows, all);
  for (uint64_t i = 0; choices.adds && i < all; ++i) {
    result[i] = static_cast<std::byte>(static_cast<int>(result[i]) + static_cast<int>(base[i]));
  }

  std::vector<std::byte> first;
  for (Execution& execution : executions()) {
    for (const DeltaBase follow : {DeltaBase::kKeep, DeltaBase::kFollow}) {
      std::vector<std::byte> delta = encode(choices, base, result, follow, execution);
      if (first.empty())
        first = std::move(delta);
      else
        require(delta == first, "two targets make other deltas");
    }
  }
  const uint64_t chunks = choices.n / 65536 + 1;
  require(first.size() <= kDeltaHeaderSize + all + chunks, "a delta is longer than the values");
  const Result<Delta> parsed = parse_delta(first);
  require(parsed.ok() && parsed.value().n == choices.n, "a delta that was just made is refused");
  for (Execution& execution : executions()) {
    std::vector<std::byte> memory(choices.shift + all);
    const auto values = std::span(memory).subspan(choices.shift);
    std::ranges::copy(base, values.begin());
    require(apply_delta(parsed.value(), values, execution).ok(), "a delta can't be applied");
    require(std::ranges::equal(values, result), "a delta does not lead to the result");
  }
  return 0;
}
