#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gradwire/codec.h"
#include "gradwire/export.h"
#include "gradwire/frame.h"
#include "gradwire/residual.h"

namespace gradwire {

// A codec and the residual of one tensor (3LC's "compression context").
class GRADWIRE_EXPORT Compressor {
 public:
  // kLimitExceeded: n > kMaxNumel.
  static Result<Compressor> create(std::shared_ptr<const Codec> codec, uint64_t n,
                                   uint64_t seed = 0, uint64_t stream = 0);

  [[nodiscard]] const Codec& codec() const noexcept { return *codec_; }
  [[nodiscard]] uint64_t n() const noexcept { return n_; }
  [[nodiscard]] uint64_t max_encoded_size() const noexcept { return max_frame_size(*codec_, n_); }
  [[nodiscard]] Residual& residual() noexcept { return residual_; }
  [[nodiscard]] const Residual& residual() const noexcept { return residual_; }

  // Encodes x (n values) plus the residual into a frame and keeps the part that was not sent.
  // kLengthMismatch, kBufferTooSmall. For non-finite input see EncodedFrame.
  Result<EncodedFrame> encode(const InputView& x, uint64_t step, std::span<std::byte> frame,
                              Execution& execution);

 private:
  Compressor(std::shared_ptr<const Codec> codec, uint64_t n, uint64_t seed, uint64_t stream);

  std::shared_ptr<const Codec> codec_;
  uint64_t n_;
  uint64_t seed_;
  uint64_t stream_;
  Residual residual_;
};

}  // namespace gradwire
