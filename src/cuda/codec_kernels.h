#pragma once

#include <cstdint>
#include <memory>

#include "cuda/segments.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Hands out parts of a call's scratch, one behind the other; from nullptr on it only counts.
class ScratchLayout {
 public:
  explicit ScratchLayout(std::byte* begin) : begin_(begin) {}

  template <typename T>
  T* take(uint64_t count) {
    static_assert(alignof(T) <= kAlignment);
    std::byte* part = begin_ == nullptr ? nullptr : begin_ + size_;
    size_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(part);
  }
  [[nodiscard]] uint64_t size() const { return size_; }

 private:
  static constexpr uint64_t kAlignment = 8;

  std::byte* begin_;
  uint64_t size_ = 0;
};

// Bytes of what take(segments, layout) takes.
template <typename Take>
uint64_t scratch_size(const Segments& segments, const Take& take) {
  ScratchLayout layout(nullptr);
  take(segments, layout);
  return layout.size();
}

// What a codec does on the device, for all segments at once. `segments.segments` and
// `segments.segment_of_chunk` are nullptr where only sizes are asked for.
class CodecKernels {
 public:
  virtual ~CodecKernels() = default;

  // Values that share a scale, in a segment of n; 0: all n.
  [[nodiscard]] virtual uint64_t bucket() const = 0;
  [[nodiscard]] virtual uint64_t encode_scratch_size(const Segments& segments) const = 0;
  [[nodiscard]] virtual uint64_t decode_scratch_size(const Segments& segments,
                                                     uint32_t sources) const = 0;
  virtual Status encode(const Segments& segments, const EncodeArguments& arguments,
                        cudaStream_t stream) const = 0;
  virtual Status decode(const Segments& segments, const DecodeArguments& arguments,
                        cudaStream_t stream) const = 0;
};

// By the symbols of codecs.def; `codec` is the one of that line.
using KernelsFactory = std::unique_ptr<const CodecKernels> (*)(const Codec& codec);

namespace kernel_factories {
#define GW_CODEC(symbol) extern const KernelsFactory symbol;
#include "codecs/codecs.def"
#undef GW_CODEC
}  // namespace kernel_factories

}  // namespace gradwire::cuda
