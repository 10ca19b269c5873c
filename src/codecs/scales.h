#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/endian.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "gradwire/execution.h"
#include "gradwire/status.h"
#include "stages/element.h"

namespace gradwire {

// How values share scales: `bucket` consecutive ones each, the last bucket may be shorter.
struct Buckets {
  uint64_t n;
  uint64_t bucket;
  uint64_t count;

  // bucket = 0: all n share one.
  Buckets(uint64_t values, uint64_t bucket_values)
      : n(values),
        bucket(bucket_values == 0 ? std::max<uint64_t>(n, 1) : bucket_values),
        count(n / bucket + (n % bucket != 0)) {}

  [[nodiscard]] uint64_t begin(uint64_t i) const { return i * bucket; }
  [[nodiscard]] uint64_t values(uint64_t i) const { return std::min(bucket, n - i * bucket); }

  // Calls body(bucket, first value, number of values) for the pieces of [begin, end) that share a
  // scale.
  template <typename Body>
  void for_each_piece(uint64_t begin, uint64_t end, const Body& body) const {
    while (begin < end) {
      const uint64_t i = begin / bucket;
      const uint64_t stop = std::min(end, (i + 1) * bucket);
      body(i, begin, stop - begin);
      begin = stop;
    }
  }
};

// kCorruptPayload unless each of `count` scales is finite, its sign bit clear, its bits at most
// `largest`, and one at least is not 0: where all are, the payload is empty.
Status check_scales(std::string_view name, const std::byte* scales, uint64_t count,
                    uint32_t largest = kNonFiniteBits - 1);

// Whether each of `count` scales is +0: then the payload is empty.
bool all_zero(const std::byte* scales, uint64_t count);

inline void raise_to(std::atomic<uint32_t>& maximum, uint32_t value) {
  uint32_t seen = maximum.load(std::memory_order_relaxed);
  while (value > seen && !maximum.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// First pass of the codecs that scale by the largest magnitude: calls put(bucket, magnitude bits)
// for each bucket and returns the largest of all; from kNonFiniteBits on it tells of NaN or Inf.
// Runs from the end to the start, so that a second pass from the start to the end begins with what
// the caches still hold.
template <typename Put>
uint32_t for_each_absmax(const Input& input, const Buckets& buckets, Execution& execution,
                         const Put& put) {
  std::atomic<uint32_t> overall{0};
  if (buckets.count == 1) {
    const uint64_t chunks = (buckets.n + kChunkValues - 1) / kChunkValues;
    execution.for_each(chunks, [&](size_t i) {
      const uint64_t begin = (chunks - 1 - i) * kChunkValues;
      raise_to(overall, input.absmax(begin, std::min(kChunkValues, buckets.n - begin)));
    });
    put(0, overall.load());
    return overall.load();
  }
  const uint64_t buckets_a_task = std::max<uint64_t>(1, kChunkValues / buckets.bucket);
  const uint64_t tasks = (buckets.count + buckets_a_task - 1) / buckets_a_task;
  execution.for_each(tasks, [&](size_t i) {
    const uint64_t first = (tasks - 1 - i) * buckets_a_task;
    const uint64_t last = std::min(buckets.count, first + buckets_a_task);
    for (uint64_t bucket = first; bucket < last; ++bucket) {
      const uint32_t magnitude = input.absmax(buckets.begin(bucket), buckets.values(bucket));
      raise_to(overall, magnitude);
      put(bucket, magnitude);
    }
  });
  return overall.load();
}

}  // namespace gradwire
