#pragma once

#include <cstdint>
#include <memory>

#include "cuda/common/segments.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Hands out the parts of a call's scratch memory, one after the other, or only counts their bytes.
class ScratchLayout {
 public:
  ScratchLayout() = default;  // counts
  explicit ScratchLayout(std::byte* begin) : begin_(begin), counts_(false) {}

  // nullptr where it counts.
  template <typename T>
  T* take(uint64_t count) {
    static_assert(alignof(T) <= kAlignment);
    std::byte* part = counts_ ? nullptr : begin_ + size_;
    size_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(part);
  }
  [[nodiscard]] uint64_t size() const { return size_; }
  [[nodiscard]] bool counts() const { return counts_; }

 private:
  static constexpr uint64_t kAlignment = 8;

  std::byte* begin_ = nullptr;
  uint64_t size_ = 0;
  bool counts_ = true;
};

// What a codec does on the device, for all segments at once. Both functions first take their
// memory from `scratch`. If it only counts, they then return, and use nothing of the arguments but
// the numbers of segments, chunks, scales and sources; otherwise they queue their kernels.
class CodecKernels {
 public:
  virtual ~CodecKernels() = default;

  // How many consecutive values share a scale; 0: all values of a segment.
  [[nodiscard]] virtual uint64_t group_size() const = 0;
  virtual Status encode(const Segments& segments, const EncodeArguments& arguments,
                        ScratchLayout& scratch, cudaStream_t stream) const = 0;
  virtual Status decode(const Segments& segments, const DecodeArguments& arguments,
                        ScratchLayout& scratch, cudaStream_t stream) const = 0;
};

// Makes the kernels of a codec; named by the symbols of cuda_kernels.def.
using KernelsFactory = std::unique_ptr<const CodecKernels> (*)(const Codec& codec);

namespace kernel_factories {
#define GW_KERNELS(symbol) extern const KernelsFactory symbol;
#include "cuda/cuda_kernels.def"
#undef GW_KERNELS
}  // namespace kernel_factories

}  // namespace gradwire::cuda
