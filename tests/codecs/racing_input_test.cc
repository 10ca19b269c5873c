// Another thread writes to the input while it is encoded, which is not allowed. Even so nothing
// outside the payload may be written, and no failure may look like success. AddressSanitizer (the
// preset asan) also sees what is read outside.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "gradwire/residual.h"
#include "tests/codecs/inputs.h"
#include "tests/codecs/variants.h"
#include "tests/sanitizers.h"

namespace gradwire {
namespace {

using limits = std::numeric_limits<float>;

constexpr uint64_t kValues = 40960 + 1000;  // a whole chunk, and a ragged one
constexpr std::byte kPattern{0xa5};

// Writes to x, without a lock, until it is destroyed.
class Racer {
 public:
  explicit Racer(std::vector<float>& x) : thread_([this, &x] { race(x); }) {}
  ~Racer() {
    stop_ = true;
    thread_.join();
  }
  Racer(const Racer&) = delete;
  Racer& operator=(const Racer&) = delete;

 private:
  void race(std::vector<float>& x) {
    // Mostly finite, as an input that is refused at once shows nothing.
    const float values[] = {0.0f, 1e-30f, 1.0f, -1.0f, 300.0f, -1e30f, FLT_MAX, 2.0f};
    const float others[] = {limits::quiet_NaN(), limits::infinity(), -limits::infinity()};
    for (uint64_t round = 0; !stop_; ++round) {
      volatile float* const to = x.data() + round * 7919 % 2000;
      for (uint64_t i = 0; i < x.size() - 2000; ++i) to[i] = values[(round + i / 300) % 8];
      if (round % 4 == 0) x[round % x.size()] = others[round / 4 % 3];
    }
  }

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Encodes x for a while, and looks at the bytes after the payload.
void encode_racing(const std::string& spec, std::string_view target, const std::vector<float>& x) {
  const auto codec = Codec::parse(spec).value();
  Execution execution = Execution::create(target).value();
  const uint64_t room = codec->max_payload_size(x.size());
  std::vector<float> decoded(x.size());
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  for (uint64_t step = 0; step < 3 || std::chrono::steady_clock::now() < end; ++step) {
    std::vector<std::byte> payload(room + 256, kPattern);
    Residual residual(codec->residual_type(), x.size());
    const Result<uint64_t> size =
        codec->encode(x, residual.view(), {.seed = 1, .stream = 2, .step = step},
                      std::span(payload).first(room), execution);
    ASSERT_TRUE(std::all_of(payload.begin() + static_cast<ptrdiff_t>(room), payload.end(),
                            [](std::byte byte) { return byte == kPattern; }))
        << spec << " " << target;
    if (size.ok()) {
      ASSERT_LE(size.value(), room) << spec << " " << target;
      // Decoders may refuse the payload.
      const auto bytes = std::span(payload).first(size.value());
      if (!codec->decode(bytes, decoded, DecodeMode::kStore, execution).ok()) continue;
    } else {
      ASSERT_NE(size.status().code(), StatusCode::kOk) << spec << " " << target;
      ASSERT_FALSE(size.status().message().empty()) << spec << " " << target;
    }
  }
}

TEST(RacingInput, IsEncodedWithinThePayload) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer reports the race";
  std::vector<float> x = heavy_tailed(kValues, 1);
  const Racer racer(x);
  for (const std::string& spec : codec_variants()) {
    for (std::string_view target : simd_targets()) encode_racing(spec, target, x);
  }
}

}  // namespace
}  // namespace gradwire
