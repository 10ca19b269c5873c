#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "gradwire/codec.h"

namespace gradwire::python {

// Arrays come in by the buffer protocol or DLPack, without a copy. Raises GradwireError
// (unsupported_dtype, invalid_argument) naming what the object is and what is wanted.

// A C-contiguous float32 array on the CPU, of any shape, and what keeps it alive.
class FloatInput {
 public:
  explicit FloatInput(nanobind::handle object);
  [[nodiscard]] std::span<const float> values() const;

 private:
  nanobind::ndarray<nanobind::ro> array_;
};

// A C-contiguous array on the CPU of any dtype that codecs take: float32, bfloat16, float16; or,
// where `bits` names one of the latter two, a uint16 array that holds its bits.
class ValueInput {
 public:
  explicit ValueInput(nanobind::handle object, std::optional<Dtype> bits = std::nullopt);
  [[nodiscard]] InputView values() const;

 private:
  nanobind::ndarray<nanobind::ro> array_;
  Dtype dtype_;
};

class FloatOutput {
 public:
  FloatOutput() = default;
  explicit FloatOutput(nanobind::handle object);
  [[nodiscard]] std::span<float> values() const;

 private:
  nanobind::ndarray<> array_;
};

// Bytes: bytes, bytearray, memoryview, a uint8 array.
class ByteInput {
 public:
  explicit ByteInput(nanobind::handle object);
  ~ByteInput();
  ByteInput(const ByteInput&) = delete;
  ByteInput& operator=(const ByteInput&) = delete;
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  Py_buffer buffer_{};
  nanobind::ndarray<nanobind::ro> array_;
  std::span<const std::byte> bytes_;
};

// A writable uint8 array.
class ByteOutput {
 public:
  explicit ByteOutput(nanobind::handle object);
  [[nodiscard]] std::span<std::byte> bytes() const;

 private:
  nanobind::ndarray<> array_;
};

using NumpyFloats = nanobind::ndarray<nanobind::numpy, float, nanobind::ndim<1>>;
using NumpyHalves = nanobind::ndarray<nanobind::numpy, uint16_t, nanobind::ndim<1>>;
using NumpyBytes = nanobind::ndarray<nanobind::numpy, const uint8_t, nanobind::ndim<1>>;

// A new NumPy array of n float32, not initialised.
[[nodiscard]] NumpyFloats new_floats(size_t n);
// The same of 16 bits.
[[nodiscard]] NumpyHalves new_halves(size_t n);
[[nodiscard]] NumpyFloats to_numpy(const std::vector<float>& values);

}  // namespace gradwire::python
