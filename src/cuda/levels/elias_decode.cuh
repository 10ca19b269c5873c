#pragma once

// From Elias codes to levels (spec/format.md, qsgd). Any bytes are safe. Each warp handles one
// chunk, as each code begins where the one before ends: one lane reads codes, and all lanes write
// the values that it has read.

#include <cstdint>

#include "codecs/qsgd/qsgd.h"
#include "cuda/coded/coded_decode.cuh"
#include "stages/elias/elias.h"
#include "stages/levels/levels.h"

namespace gradwire::cuda {

// So many levels are read before they are written.
inline constexpr uint32_t kReadLevels = 1024;

// Reads bits, the highest of a byte first; zeros follow the end.
class EliasReader {
 public:
  __device__ EliasReader(const uint8_t* bytes, uint32_t size) : bytes_(bytes), size_(size) {}

  __device__ uint32_t bit() {
    fill();
    const auto value = static_cast<uint32_t>(window_ >> 63);
    skip(1);
    return value;
  }

  // 0: the number is kEliasLimit or more.
  __device__ uint32_t number() {
    fill();
    const EliasNumber number = elias_read(window_);
    skip(static_cast<uint32_t>(number.length));
    return number.value;
  }

  // Whether less than a byte is left, and that is zeros.
  __device__ bool at_end() {
    fill();
    return (used_ + 7) / 8 == size_ && window_ == 0;
  }
  __device__ bool overrun() const { return used_ > 8 * uint64_t{size_}; }

 private:
  // Fills the window with at least 56 bits.
  __device__ void fill() {
    for (; filled_ <= 56; filled_ += 8) {
      const uint64_t byte = next_ < size_ ? bytes_[next_] : 0;
      if (next_ < size_) ++next_;
      window_ |= byte << (56 - filled_);
    }
  }
  __device__ void skip(uint32_t bits) {
    window_ <<= bits;
    filled_ -= bits;
    used_ += bits;
  }

  const uint8_t* bytes_;
  uint32_t size_;
  uint32_t next_ = 0;
  uint64_t window_ = 0;
  uint32_t filled_ = 0;  // bits of the window
  uint64_t used_ = 0;
};

__device__ inline int8_t signed_level(uint32_t magnitude, uint32_t sign) {
  const auto level = static_cast<int32_t>(magnitude);
  return static_cast<int8_t>(sign != 0 ? -level : level);
}

// Reads the levels of a chunk of n, some at a time.
class LevelDecoder {
 public:
  __device__ LevelDecoder(const uint8_t* bytes, uint32_t size, uint32_t n,
                          QsgdParameters parameters)
      : reader_(bytes, size), n_(n), parameters_(parameters) {}

  // Reads the levels from `begin` to `end` onto zeros; each call goes on where the last one ended.
  // false: the bytes do not stand for n levels.
  __device__ bool read(uint32_t begin, uint32_t end, int8_t* levels) {
    const bool fine = parameters_.coder == LevelCoder::kDense ? read_dense(begin, end, levels)
                                                              : read_sparse(begin, end, levels);
    return fine && !reader_.overrun() && (end < n_ || reader_.at_end());
  }

 private:
  __device__ bool read_dense(uint32_t begin, uint32_t end, int8_t* levels) {
    for (uint32_t at = begin; at < end; ++at) {
      const uint32_t number = reader_.number();
      if (number == 0 || number > static_cast<uint32_t>(parameters_.levels) + 1) return false;
      levels[at - begin] = signed_level(number - 1, number > 1 ? reader_.bit() : 0);
    }
    return true;
  }

  __device__ bool read_sparse(uint32_t begin, uint32_t end, int8_t* levels) {
    if (begin == 0 && !read_distance()) return false;
    // Place n is read with the last levels, as nothing stands there.
    while (next_ <= end && next_ <= n_) {
      const uint32_t sign = reader_.bit();
      const uint32_t magnitude = reader_.number();
      if (magnitude == 0 || magnitude > static_cast<uint32_t>(parameters_.levels)) return false;
      levels[next_ - 1 - begin] = signed_level(magnitude, sign);
      if (!read_distance()) return false;
    }
    return true;
  }

  __device__ bool read_distance() {
    const uint32_t distance = reader_.number();
    if (distance == 0 || distance > n_ + 1 - next_) return false;
    next_ += distance;
    return true;
  }

  EliasReader reader_;
  uint32_t n_;
  QsgdParameters parameters_;
  uint32_t next_ = 0;  // sparse: after the next level that is not 0; n + 1: there is none
};

static GW_KERNEL void decode_elias_levels(Segments segments, Decoding decoding,
                                          QsgdParameters parameters) {
  __shared__ int8_t all_levels[kWarps][kReadLevels];
  const uint64_t number = static_cast<uint64_t>(blockIdx.x) * kWarps + warp();
  if (number >= segments.chunks) return;
  const Chunk chunk = Chunk::create(segments, static_cast<uint32_t>(number));
  const uint8_t* bytes = decoding.bytes_of(chunk, lane(), kLanes);
  if (bytes == nullptr) return;
  const uint8_t* units = decoding.scales_of(chunk);
  int8_t* levels = all_levels[warp()];
  const ScaleOf scale_of(chunk);
  LevelDecoder decoder(bytes, decoding.size[chunk.number], chunk.n, parameters);
  bool valid = decoding.any_scale[chunk.index] != 0;
  for (uint32_t begin = 0; begin < chunk.n && valid; begin += kReadLevels) {
    const uint32_t end = min(begin + kReadLevels, chunk.n);
    for (uint32_t i = lane(); i < kReadLevels; i += kLanes) levels[i] = 0;
    __syncwarp();
    uint32_t fine = 0;
    if (lane() == 0) fine = decoder.read(begin, end, levels) ? 1 : 0;
    valid = __shfl_sync(kAllLanes, fine, 0) != 0;
    __syncwarp();
#pragma unroll 4
    for (uint32_t at = begin + lane(); at < end && valid; at += kLanes) {
      const float unit = float_of(load_word<uint32_t>(units + 4 * scale_of(at)));
      const float value = level_value(levels[at - begin], unit);
      float& out = decoding.out[chunk.begin + at];
      out = decoding.mode == DecodeMode::kStore ? value : out + value;
    }
    __syncwarp();
  }
  if (!valid && lane() == 0) decoding.refuse(chunk);
}

}  // namespace gradwire::cuda
