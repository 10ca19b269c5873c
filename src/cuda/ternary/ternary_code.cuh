#pragma once

// From the trits of a chunk, two bit arrays in shared memory, to coded bytes (spec/format.md). The
// whole block works on one chunk.

#include <cstdint>

#include "codecs/chunks.h"
#include "codecs/ternary_coder.h"
#include "cuda/common/block.cuh"
#include "stages/rice/rice.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"
#include "stages/trits/two_bits.h"
#include "stages/zero_run/zero_run.h"

namespace gradwire::cuda {

inline constexpr uint32_t kChunkWords = kChunkValues / 32;
inline constexpr uint32_t kPackedBytes = kChunkValues / kTritsPerByte;
inline constexpr uint32_t kTwoBitBytes = kChunkValues / kTwoBitTrits;
inline constexpr uint32_t kMostGroups = kChunkValues / kRiceGroup;

// Trits as in stages/trits/trit_bits.h, in words of 32 bits; bits after the last value are 0. There
// is one word more, so that five bits can be read across the last one.
struct TritWords {
  uint32_t plus[kChunkWords + 1];
  uint32_t minus[kChunkWords + 1];
};

// Coded bytes, and a word after them that copy_out may read.
struct CodedWords {
  uint32_t words[kTwoBitBytes / 4 + 1];
};

// Further shared memory of the coders.
union CoderScratch {
  struct {
    uint32_t bytes[kPackedBytes / 4];
  } packed;
  struct {
    uint16_t before[kChunkWords];  // non-zeros before each word
    uint16_t bits[kMostGroups];    // of each group, with its k
    uint8_t k[kMostGroups];
  } rice;
};

// Writes the word after the last one of n values. All other words were written before.
__device__ inline void end_trits(uint32_t n, TritWords& trits) {
  if (threadIdx.x == 0) {
    trits.plus[(n + 31) / 32] = 0;
    trits.minus[(n + 31) / 32] = 0;
  }
  __syncthreads();
}

// `count` bits from bit `at` on, at most 32.
__device__ inline uint32_t bits_from(const uint32_t* words, uint32_t at, uint32_t count) {
  const uint64_t both =
      static_cast<uint64_t>(words[at / 32]) | static_cast<uint64_t>(words[at / 32 + 1]) << 32;
  return static_cast<uint32_t>(both >> at % 32) & static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

// The packed byte of five trits that begin at value `at`.
__device__ inline uint32_t packed_byte(const TritWords& trits, uint32_t at) {
  return static_cast<uint32_t>(kZeroByte +
                               weight_of_five(bits_from(trits.plus, at, kTritsPerByte)) -
                               weight_of_five(bits_from(trits.minus, at, kTritsPerByte)));
}

// Packs five trits to a byte; the last word is filled up with any bits.
__device__ inline void pack_five(const TritWords& trits, uint32_t n, uint32_t* packed) {
  const auto size = static_cast<uint32_t>(packed_size(n));
  for (uint32_t word = threadIdx.x; word * 4 < size; word += kThreads) {
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < 4 && word * 4 + i < size; ++i) {
      bytes |= packed_byte(trits, (word * 4 + i) * kTritsPerByte) << 8 * i;
    }
    packed[word] = bytes;
  }
  __syncthreads();
}

// Packs four trits to a byte.
__device__ inline void pack_four(const TritWords& trits, uint32_t n, uint32_t* packed) {
  for (uint32_t word = threadIdx.x; word * 16 < n; word += kThreads) {
    const uint32_t shift = word % 2 * 16;
    const uint32_t plus = trits.plus[word / 2] >> shift & 0xffffu;
    const uint32_t minus = trits.minus[word / 2] >> shift & 0xffffu;
    packed[word] = static_cast<uint32_t>(spread_bits(plus) | spread_bits(minus) << 1);
  }
  __syncthreads();
}

// Codes runs of zero bytes; each thread handles 32 packed bytes. A zero byte gives a code only at
// the end of its run, or after each 14 bytes of it; so each byte gives one code or none.
__device__ inline uint32_t code_zero_runs(const uint32_t* packed_words, uint32_t size,
                                          uint32_t* coded, BlockShared& shared) {
  constexpr uint32_t kEach = kPackedBytes / kThreads;
  const auto* packed = reinterpret_cast<const uint8_t*>(packed_words);
  auto* out = reinterpret_cast<uint8_t*>(coded);
  const uint32_t begin = threadIdx.x * kEach;
  const uint32_t end = min(begin + kEach, size);
  uint32_t run_begin = 0;  // after the last byte before this one that is no zero byte
  for (uint32_t i = begin; i < end; ++i) {
    if (packed[i] != kZeroByte) run_begin = i + 1;
  }
  run_begin = block_exclusive_max(run_begin, shared);
  const auto code_at = [&](uint32_t i, uint32_t& run) -> int {
    if (packed[i] != kZeroByte) {
      run = i + 1;
      return packed[i];
    }
    const auto length = static_cast<int>((i - run) % kLongestRun) + 1;
    const bool ends = i + 1 == size || packed[i + 1] != kZeroByte;
    return ends || length == kLongestRun ? run_code(length) : -1;
  };
  uint32_t codes = 0;
  uint32_t run = run_begin;
  for (uint32_t i = begin; i < end; ++i) codes += code_at(i, run) >= 0;
  uint32_t total = 0;
  uint32_t at = block_exclusive_sum(codes, shared, total);
  run = run_begin;
  for (uint32_t i = begin; i < end; ++i) {
    const int code = code_at(i, run);
    if (code >= 0) out[at++] = static_cast<uint8_t>(code);
  }
  __syncthreads();
  return total;
}

// The position of the non-zero that has `rank` others before it.
__device__ inline uint32_t find_non_zero(const TritWords& trits, const uint16_t* before,
                                         uint32_t words, uint32_t rank) {
  uint32_t word = 0;  // the last word with at most `rank` non-zeros before it
  for (uint32_t step = 1024; step > 0; step /= 2) {
    if (word + step < words && before[word + step] <= rank) word += step;
  }
  uint32_t bits = trits.plus[word] | trits.minus[word];
  for (uint32_t skip = rank - before[word]; skip > 0; --skip) bits &= bits - 1;
  return word * 32 + static_cast<uint32_t>(__ffs(static_cast<int>(bits))) - 1;
}

// A lane's non-zero of a group of 32; lanes after the last non-zero have none.
struct GroupMember {
  bool there;
  uint32_t gap;
  uint32_t sign;
};

__device__ inline GroupMember member_of(const TritWords& trits, const uint16_t* before,
                                        uint32_t words, uint32_t group, uint32_t non_zeros) {
  const uint32_t rank = group * kRiceGroup + lane();
  const bool there = rank < non_zeros;
  const uint32_t at = there ? find_non_zero(trits, before, words, rank) : 0;
  uint32_t previous = __shfl_up_sync(kAllLanes, at, 1);
  if (lane() == 0 && rank > 0) previous = find_non_zero(trits, before, words, rank - 1);
  const uint32_t gap = rank == 0 ? at : at - previous - 1;
  return {there, gap, trits.minus[at / 32] >> at % 32 & 1};
}

// Counts the bits of the words that hold n values: before[i] becomes how many there are before word
// i. Returns how many there are in all.
template <typename WordAt>
__device__ uint32_t count_before(uint32_t n, const WordAt& word_at, uint16_t* before,
                                 BlockShared& shared) {
  constexpr uint32_t kEach = kChunkWords / kThreads;
  static_assert(kEach * kThreads == kChunkWords);
  const uint32_t first = threadIdx.x * kEach;
  const uint32_t end = min(first + kEach, (n + 31) / 32);
  uint32_t own = 0;
  for (uint32_t i = first; i < end; ++i) own += static_cast<uint32_t>(__popc(word_at(i)));
  uint32_t total = 0;
  uint32_t sum = block_exclusive_sum(own, shared, total);
  for (uint32_t i = first; i < end; ++i) {
    before[i] = static_cast<uint16_t>(sum);
    sum += static_cast<uint32_t>(__popc(word_at(i)));
  }
  __syncthreads();
  return total;
}

// Codes the gaps in Golomb-Rice code; each warp handles one group. Returns the size, or
// packed_size(n) where the code would not be smaller; then nothing is written.
__device__ inline uint32_t code_gaps(const TritWords& trits, uint32_t n, uint32_t* coded,
                                     CoderScratch& scratch, BlockShared& shared) {
  static_assert(kRiceGroup == kLanes);
  uint16_t* before = scratch.rice.before;
  const uint32_t words = (n + 31) / 32;
  const uint32_t non_zeros = count_before(
      n, [&](uint32_t word) { return trits.plus[word] | trits.minus[word]; }, before, shared);

  const uint32_t groups = (non_zeros + kRiceGroup - 1) / kRiceGroup;
  for (uint32_t group = warp(); group < groups; group += kWarps) {
    const GroupMember member = member_of(trits, before, words, group, non_zeros);
    uint32_t best = ~0u;
    uint32_t best_k = 0;
    for (int k = 0; k < kRiceChoices; ++k) {
      const uint32_t length = member.there ? static_cast<uint32_t>(rice_length(member.gap, k)) : 0;
      const uint32_t all = __reduce_add_sync(kAllLanes, length);
      if (all < best) {
        best = all;
        best_k = static_cast<uint32_t>(k);
      }
    }
    if (lane() == 0) {
      scratch.rice.bits[group] = static_cast<uint16_t>(kRiceHeadBits + best);
      scratch.rice.k[group] = static_cast<uint8_t>(best_k);
    }
  }
  __syncthreads();

  // Each thread handles five groups; the numbers of bits become places.
  constexpr uint32_t kGroupsEach = kMostGroups / kThreads;
  uint32_t own_bits = 0;
  for (uint32_t i = 0; i < kGroupsEach; ++i) {
    const uint32_t group = threadIdx.x * kGroupsEach + i;
    if (group < groups) own_bits += scratch.rice.bits[group];
  }
  uint32_t total_bits = 0;
  uint32_t place = block_exclusive_sum(own_bits, shared, total_bits);
  const uint32_t size = (total_bits + 7) / 8;
  const auto packed = static_cast<uint32_t>(packed_size(n));
  if (size >= packed) return packed;
  for (uint32_t i = 0; i < kGroupsEach; ++i) {
    const uint32_t group = threadIdx.x * kGroupsEach + i;
    if (group >= groups) break;
    const uint32_t bits = scratch.rice.bits[group];
    scratch.rice.bits[group] = static_cast<uint16_t>(place);  // below 8 * 8192
    place += bits;
  }
  for (uint32_t i = threadIdx.x; i <= size / 4; i += kThreads) coded[i] = 0;
  __syncthreads();

  const auto put = [&](uint32_t at, uint32_t bits) {
    atomicOr(&coded[at / 32], bits << at % 32);
    const uint32_t rest = at % 32 == 0 ? 0 : bits >> (32 - at % 32);
    if (rest != 0) atomicOr(&coded[at / 32 + 1], rest);
  };
  for (uint32_t group = warp(); group < groups; group += kWarps) {
    const GroupMember member = member_of(trits, before, words, group, non_zeros);
    const uint32_t k = scratch.rice.k[group];
    const RiceCode code = rice_code(member.gap, member.sign, static_cast<int>(k));
    const uint32_t length = member.there ? static_cast<uint32_t>(code.length) : 0;
    const uint32_t at =
        scratch.rice.bits[group] + kRiceHeadBits + warp_inclusive_sum(length) - length;
    if (lane() == 0) put(scratch.rice.bits[group], k);
    if (member.there) put(at, code.bits);
  }
  __syncthreads();
  return size;
}

// Codes the n trits of a chunk. Returns the size in bytes.
__device__ inline uint32_t code_trits(TernaryCoder coder, const TritWords& trits, uint32_t n,
                                      CodedWords& coded, CoderScratch& scratch,
                                      BlockShared& shared) {
  const auto packed = static_cast<uint32_t>(packed_size(n));
  switch (coder) {
    case TernaryCoder::kNone:
      pack_five(trits, n, coded.words);
      return packed;
    case TernaryCoder::kTwoBit:
      pack_four(trits, n, coded.words);
      return static_cast<uint32_t>(two_bit_size(n));
    case TernaryCoder::kZeroRun:
      pack_five(trits, n, scratch.packed.bytes);
      return code_zero_runs(scratch.packed.bytes, packed, coded.words, shared);
    case TernaryCoder::kRice: {
      const uint32_t size = code_gaps(trits, n, coded.words, scratch, shared);
      if (size == packed) pack_five(trits, n, coded.words);
      return size;
    }
  }
  return 0;
}

}  // namespace gradwire::cuda
