// Applies any bytes as a delta: as they are, and then with correct magic, version, sizes and
// checksum, so that the fuzzer gets past these checks. Then folds the delta with itself.
//
// Input: two bytes, then a delta. The first byte, repeated, is the base; the second gives one in
// eight its address.

#include <cstring>

#include "base/checksum.h"
#include "base/endian.h"
#include "fuzzing.h"
#include "gradwire/delta.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

constexpr size_t kChoicesSize = 2;

void repair_delta(std::span<std::byte> delta) {
  if (delta.size() < kDeltaHeaderSize) return;
  std::memcpy(delta.data(), "GD\1", 3);
  store_le(delta.data() + 40, uint64_t{delta.size() - kDeltaHeaderSize});
  store_le(delta.data() + 4, checksum32(delta.first(4), delta.subspan(8)));
}

struct Applied {
  StatusCode code = StatusCode::kOk;
  std::vector<std::byte> values;
};

// The array begins `shift` bytes after the memory's beginning, and ends with it.
Applied apply(const Delta& delta, std::byte base, size_t shift, Execution& execution) {
  std::vector<std::byte> memory(shift + delta.n * width_of(delta.element), base);
  const auto values = std::span(memory).subspan(shift);
  const Status status = apply_delta(delta, values, execution);
  require(status.ok() || status.code() == StatusCode::kCorruptPayload ||
              status.code() == StatusCode::kChecksumMismatch,
          "unexpected status");
  require(status.ok() || !status.message().empty(), "a refusal without a message");
  require(!status.ok() || digest_array(values, execution) == delta.result_digest,
          "values with another digest are taken for the result");
  return {status.code(), {values.begin(), values.end()}};
}

// A delta that is decoded before does the same.
void check_decoded(Delta delta, std::byte base, size_t shift, const Applied& whole) {
  const Status decoded = decode_delta(delta, executions().front());
  if (!decoded.ok()) {
    require(decoded.code() == whole.code, "decoding finds another fault than applying");
    return;
  }
  const Applied later = apply(delta, base, shift, executions().front());
  require(later.code == whole.code, "a delta that was decoded has another status");
  require(whole.code == StatusCode::kCorruptPayload || later.values == whole.values,
          "a delta that was decoded makes other values");
}

void check(std::span<const std::byte> bytes, std::byte base, size_t shift) {
  const Result<Delta> parsed = parse_delta(bytes);
  if (!parsed.ok()) {
    require(!parsed.status().message().empty(), "a refusal without a message");
    return;
  }
  Delta delta = parsed.value();
  if (delta.n > kMaxFuzzedNumel) return;
  const Applied first = apply(delta, base, shift, executions().back());
  check_decoded(delta, base, shift, first);
  for (Execution& execution : executions()) {
    const Applied other = apply(delta, base, 0, execution);
    require(other.code == first.code, "two targets differ in their status");
    require(first.code == StatusCode::kCorruptPayload || other.values == first.values,
            "two targets make other values");
  }
  if (first.code == StatusCode::kCorruptPayload) return;
  // Valid chunks, whatever the digests: with the right ones, it is a delta of these arrays.
  Execution& execution = executions().front();
  delta.result_digest = digest_array(first.values, execution);
  require(apply(delta, base, 0, execution).code == StatusCode::kOk, "a valid delta is refused");
  Delta next = delta;
  next.base_digest = delta.result_digest;
  std::vector<std::byte> twice = first.values;
  next.result_digest = 0;
  const StatusCode code = apply_delta(next, twice, execution).code();
  require(code == StatusCode::kOk || code == StatusCode::kChecksumMismatch, "a base matters");
  next.result_digest = digest_array(twice, execution);
  std::vector<std::byte> folded(max_delta_size(delta.element, delta.n));
  const auto written = fold_deltas(delta, next, folded, execution);
  require(written.ok(), "valid deltas can't be folded");
  folded.resize(written.value().size);
  const auto fold = parse_delta(folded);
  require(fold.ok(), "a fold is refused");
  require(apply(fold.value(), base, 0, execution).values == twice, "a fold is not its deltas");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kChoicesSize) return 0;
  std::vector<std::byte> bytes = exact_copy({data + kChoicesSize, size - kChoicesSize});
  const size_t shift = data[1] % 8 == 0 ? data[1] / 8 % 8 : 0;
  check(bytes, std::byte{data[0]}, shift);
  repair_delta(bytes);
  check(bytes, std::byte{data[0]}, shift);
  return 0;
}
