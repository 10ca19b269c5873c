#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "gradwire/codec.h"

namespace gradwire::python {

// Arrays are read through the buffer protocol or DLPack, without a copy. A wrong object raises a
// GradwireError (unsupported_dtype, invalid_argument), which names the object's type and the
// expected type.

// An object that callers pass as an array; the stub defines _Array.
struct Array : nanobind::handle {
  // nanobind looks for this name. NOLINTNEXTLINE(readability-identifier-naming)
  static constexpr auto Name = nanobind::detail::const_name("_Array");
};
using ArrayLike = nanobind::typed<nanobind::handle, Array>;

// A C-contiguous array on the CPU of any shape, and a reference that keeps it alive. T: const
// float, float or uint8_t; without const it is writable.
template <typename T>
class HostArray {
 public:
  HostArray() = default;
  explicit HostArray(nanobind::handle object);
  [[nodiscard]] std::span<T> values() const {
    return {static_cast<T*>(array_.data()), array_.size()};
  }

 private:
  std::conditional_t<std::is_const_v<T>, nanobind::ndarray<nanobind::ro>, nanobind::ndarray<>>
      array_;
};
using FloatInput = HostArray<const float>;
using FloatOutput = HostArray<float>;
using ByteOutput = HostArray<uint8_t>;

// A C-contiguous array on the CPU of a dtype that codecs take: float32, bfloat16 or float16. If
// `bits` names one of the latter two, it may be a uint16 array of its bits.
class ValueInput {
 public:
  explicit ValueInput(nanobind::handle object, std::optional<Dtype> bits = std::nullopt);
  [[nodiscard]] InputView values() const;
  [[nodiscard]] std::span<const std::byte> bytes() const;

 private:
  nanobind::ndarray<nanobind::ro> array_;
  Dtype dtype_;
};

// A bytes object, bytearray, memoryview or uint8 array.
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

template <typename T>
using NumpyArray = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

// A new NumPy array of n uninitialised values, float or uint16_t.
template <typename T>
[[nodiscard]] NumpyArray<T> new_array(size_t n);

// Raises an error if what is read and what is written have bytes in common.
void require_apart(std::span<const std::byte> read, std::span<const std::byte> written);

// Lets PyTorch see that the values of a tensor were written. Does nothing for other objects.
void note_write(nanobind::handle tensor);

[[nodiscard]] NumpyArray<float> to_numpy(const std::vector<float>& values);

}  // namespace gradwire::python
