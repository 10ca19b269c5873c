#pragma once

// TernGrad's exchange in one process, and gradients of ranks whose own scales differ.

#include "tests/exchange/cluster.h"

namespace gradwire {

inline MakeExchange terngrad(uint64_t seed = 0) {
  return [seed](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_exchange("terngrad", layout, rank, Execution::create().value(), {.seed = seed})
        .value();
  };
}

inline Buckets uneven_buckets(uint32_t world, uint64_t n, uint64_t seed) {
  Buckets buckets = random_buckets(world, n, seed);
  for (uint32_t r = 0; r < world; ++r) {
    for (float& value : buckets[r]) value *= 1.0f + 0.25f * static_cast<float>(r % 4);
  }
  return buckets;
}

}  // namespace gradwire
