#include "gradwire/compressor.h"

#include <string>
#include <utility>

namespace gradwire {

Result<Compressor> Compressor::create(std::shared_ptr<const Codec> codec, uint64_t n, uint64_t seed,
                                      uint64_t stream) {
  if (n > kMaxNumel) {
    return Status(StatusCode::kLimitExceeded,
                  "compressor: " + std::to_string(n) + " values are more than the limit of 2^40");
  }
  return Compressor(std::move(codec), n, seed, stream);
}

Compressor::Compressor(std::shared_ptr<const Codec> codec, uint64_t n, uint64_t seed,
                       uint64_t stream)
    : codec_(std::move(codec)),
      n_(n),
      seed_(seed),
      stream_(stream),
      residual_(codec_->residual_type(), n) {}

Result<EncodedFrame> Compressor::encode(const InputView& x, uint64_t step,
                                        std::span<std::byte> frame, Execution& execution) {
  if (x.size() != n_) {
    return Status(StatusCode::kLengthMismatch, "this compressor takes " + std::to_string(n_) +
                                                   " values, got " + std::to_string(x.size()));
  }
  const DrawContext draw = {.seed = seed_, .stream = stream_, .step = step};
  return encode_frame(*codec_, x, residual_.view(), draw, frame, execution);
}

}  // namespace gradwire
