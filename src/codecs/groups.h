#pragma once

#include <algorithm>
#include <cstdint>

namespace gradwire {

// Groups of `size` consecutive values that share a scale; the last group may be shorter.
struct Groups {
  uint64_t n;
  uint64_t size;
  uint64_t count;

  // group_size = 0: all n are one group.
  Groups(uint64_t values, uint64_t group_size)
      : n(values),
        size(group_size == 0 ? std::max<uint64_t>(n, 1) : group_size),
        count(n / size + (n % size != 0)) {}

  [[nodiscard]] uint64_t begin(uint64_t group) const { return group * size; }
  [[nodiscard]] uint64_t values(uint64_t group) const { return std::min(size, n - group * size); }

  // Calls body(group, first value, number of values) for the pieces of [begin, end) that lie in one
  // group.
  template <typename Body>
  void for_each_piece(uint64_t begin, uint64_t end, const Body& body) const {
    for (uint64_t group = begin / size; begin < end; ++group) {
      const uint64_t stop = std::min(end, (group + 1) * size);
      body(group, begin, stop - begin);
      begin = stop;
    }
  }
};

}  // namespace gradwire
