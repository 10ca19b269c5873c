#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradwire/codec.h"
#include "stages/kernels.h"

namespace gradwire {

// One value of x.
[[nodiscard]] float value_of(const InputView& x, uint64_t i);

// The input of an encoder, part by part: b = x + residual as float32, whatever the types of x and
// of the residual are. After encoding, the new residual is stored.
class Input {
 public:
  // The most values in a part: they and their decoded values stay in the L1 cache. They fill whole
  // words of bits and whole packed bytes.
  static constexpr uint64_t kPartValues = 3840;

  Input(const InputView& x, const ResidualView& residual, const Kernels& kernels)
      : x_(x), residual_(residual), kernels_(&kernels) {}

  [[nodiscard]] const Kernels& kernels() const { return *kernels_; }
  [[nodiscard]] const InputView& x() const { return x_; }
  [[nodiscard]] const ResidualView& residual() const { return residual_; }
  [[nodiscard]] uint64_t size() const { return x_.size(); }
  [[nodiscard]] bool is_f32() const { return x_.dtype() == Dtype::kFloat32; }
  [[nodiscard]] bool keeps_residual() const { return residual_.type() != ResidualType::kNone; }

  // The n values from `begin` on: x itself where it is float32 and there is no residual, else
  // written to `buffer`, which has room for n.
  const float* load(uint64_t begin, uint64_t n, float* buffer) const;

  // residual = b - decoded, for values that were loaded. `decoded` is overwritten.
  void keep(uint64_t begin, uint64_t n, const float* b, float* decoded) const;

  // residual = left, for encoders that compute the new residual themselves.
  void store(uint64_t begin, uint64_t n, const float* left) const;

  // The same for value i alone.
  void store(uint64_t i, float left) const;

  // residual = (residual + decoded) - x, for n values from `begin` on that were encoded.
  void restore(uint64_t begin, uint64_t n, const float* decoded) const;

  // b of value i, for samples and for messages.
  [[nodiscard]] float at(uint64_t i) const;

  // Calls body(first, count, x, r) for kernels that add the residual themselves: with all of the n
  // values from `begin` on where x is float32, else part by part, as for_each_part.
  template <typename Body>
  void with_residual(uint64_t begin, uint64_t n, const Body& body) const {
    const auto call = [&](uint64_t first, uint64_t count, const float* x) {
      body(first, count, x, residual_from(begin + first));
    };
    if (is_f32()) return call(0, n, x_.f32() + begin);
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
  // where there is a residual, decode(first, count, decoded) for the decoder's values.
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
  [[nodiscard]] ResidualValues residual_from(uint64_t begin) const;
  // x as float32: x itself, or widened into `buffer`.
  const float* widen(uint64_t begin, uint64_t n, float* buffer) const;

  InputView x_;
  ResidualView residual_;
  const Kernels* kernels_;
};

}  // namespace gradwire
