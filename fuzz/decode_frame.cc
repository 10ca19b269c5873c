// Decodes any bytes as a frame: as they are, and then with correct magic, version, length and
// checksum, so that the fuzzer gets past these checks.

#include <algorithm>

#include "fuzzing.h"
#include "gradwire/frame.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

void check(std::span<const std::byte> bytes) {
  const Result<Frame> frame = parse_frame(bytes);
  if (!frame.ok()) {
    require(!frame.status().message().empty(), "a refusal without a message");
    return;
  }
  if (frame.value().n > kMaxFuzzedNumel) return;
  if (frame.value().content == FrameContent::kValues) {
    return check_decoders(*frame.value().codec, frame.value().payload, frame.value().n);
  }
  std::vector<float> values(frame.value().n);
  require(decode_frame(frame.value(), values, DecodeMode::kStore, executions().front()).ok(),
          "a marker is refused");
  require(std::all_of(values.begin(), values.end(), [](float x) { return x != x; }),
          "a marker decodes to something else than NaN");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes = exact_copy({data, size});
  check(bytes);
  repair_frame(bytes);
  check(bytes);
  return 0;
}
