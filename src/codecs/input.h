#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradwire/codec.h"
#include "stages/kernels.h"

namespace gradwire {

// One value of x, and of x + residual: for samples and for what has gone wrong.
[[nodiscard]] float value_of(const InputView& x, uint64_t i);
[[nodiscard]] float sum_of(const InputView& x, const ResidualView& residual, uint64_t i);

// What is encoded, part by part: b = x + residual as float32, whatever the two are kept in; and
// after encoding, what is left of b goes back into the residual.
class Input {
 public:
  // Values of a part at most: they and what they decode to stay in the L1 or L2 cache.
  static constexpr uint64_t kPartValues = 4096;

  Input(const InputView& x, const ResidualView& residual, const Kernels& kernels)
      : x_(x), residual_(residual), kernels_(&kernels) {}

  [[nodiscard]] const Kernels& kernels() const { return *kernels_; }
  [[nodiscard]] bool keeps_residual() const { return residual_.type() != ResidualType::kNone; }

  // The n values from `begin` on: x itself where it is float32 and there is no residual, else
  // written to `buffer`, which has room for n.
  const float* load(uint64_t begin, uint64_t n, float* buffer) const;

  // residual = b - decoded, for values that were loaded. `decoded` is overwritten.
  void keep(uint64_t begin, uint64_t n, const float* b, float* decoded) const;

  // residual = left, for encoders that know what is left of the values.
  void store(uint64_t begin, uint64_t n, const float* left) const;

  // The same for value i alone.
  void store(uint64_t i, float left) const;

  [[nodiscard]] float at(uint64_t i) const { return sum_of(x_, residual_, i); }

  // Calls none(first, count, x), f32(first, count, x, r) or bf16(first, count, x, r), whichever the
  // residual is, for kernels that add it themselves: with all of the n values from `begin` on where
  // x is float32, else part by part. `first` as in for_each_part.
  template <typename None, typename F32, typename Bf16>
  void with_residual(uint64_t begin, uint64_t n, const None& none, const F32& f32,
                     const Bf16& bf16) const {
    const auto call = [&](uint64_t first, uint64_t count, const float* x) {
      switch (residual_.type()) {
        case ResidualType::kNone:
          return none(first, count, x);
        case ResidualType::kFloat32:
          return f32(first, count, x, residual_.f32() + begin + first);
        case ResidualType::kBfloat16:
          return bf16(first, count, x, residual_.bf16() + begin + first);
      }
    };
    if (x_.dtype() == Dtype::kFloat32) return call(0, n, x_.f32() + begin);
    Input(x_, {}, *kernels_).for_each_part(begin, n, call);
  }

  // Largest magnitude bits of b among n values from `begin` on.
  [[nodiscard]] uint32_t absmax(uint64_t begin, uint64_t n) const;

  // Calls body(first, count, b) for parts of the n values from `begin` on, in order. `first` counts
  // from `begin`, and is a multiple of kPartValues.
  template <typename Body>
  void for_each_part(uint64_t begin, uint64_t n, const Body& body) const {
    float buffer[kPartValues];
    for (uint64_t first = 0; first < n; first += kPartValues) {
      const uint64_t count = std::min(kPartValues, n - first);
      body(first, count, load(begin + first, count, buffer));
    }
  }

  // The same for encoders whose parts can be decoded one by one: encode(first, count, b), and,
  // where there is a residual, decode(first, count, decoded) for what the decoder will see.
  template <typename Encode, typename Decode>
  void encode_parts(uint64_t begin, uint64_t n, const Encode& encode, const Decode& decode) const {
    float decoded[kPartValues];
    for_each_part(begin, n, [&](uint64_t first, uint64_t count, const float* b) {
      encode(first, count, b);
      if (!keeps_residual()) return;
      decode(first, count, decoded);
      keep(begin + first, count, b, decoded);
    });
  }

 private:
  InputView x_;
  ResidualView residual_;
  const Kernels* kernels_;
};

}  // namespace gradwire
