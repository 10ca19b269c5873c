#pragma once

// Spans that end (or start) at an inaccessible page: a read or write after the end (or before the
// start) ends the test program.

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "gtest/gtest.h"
#include <sys/mman.h>

namespace gradwire {

enum class Edge { kEnd, kStart };  // the end of the span at which the inaccessible page lies

inline constexpr Edge kEdges[] = {Edge::kEnd, Edge::kStart};

// `capacity` elements between two inaccessible pages, from which spans at either edge are taken.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t capacity) {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    bytes_ = (capacity * sizeof(T) + page_ - 1) / page_ * page_;
    void* memory = mmap(nullptr, bytes_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    base_ = static_cast<uint8_t*>(memory) + page_;
    if (mprotect(base_, bytes_, PROT_READ | PROT_WRITE) != 0) abort();
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_ - page_, bytes_ + 2 * page_); }

  // The first or last n elements. They and some elements beside them hold a pattern.
  T* take(size_t n, Edge edge) {
    const size_t marked = std::min(bytes_, n * sizeof(T) + kMargin);
    first_ = edge == Edge::kStart ? base_ : base_ + bytes_ - marked;
    last_ = first_ + marked;
    std::fill(first_, last_, kPattern);
    n_ = n;
    data_ = edge == Edge::kStart ? reinterpret_cast<T*>(first_) : reinterpret_cast<T*>(last_) - n;
    return data_;
  }

  T* take_copy(const std::vector<T>& from, Edge edge) {
    std::copy(from.begin(), from.end(), take(from.size(), edge));
    return data_;
  }

  [[nodiscard]] std::vector<T> copy() const { return std::vector<T>(data_, data_ + n_); }

  // Whether the elements next to the span still hold the pattern.
  [[nodiscard]] bool outside_untouched() const {
    const auto is_pattern = [](uint8_t byte) { return byte == kPattern; };
    return std::all_of(first_, reinterpret_cast<uint8_t*>(data_), is_pattern) &&
           std::all_of(reinterpret_cast<uint8_t*>(data_ + n_), last_, is_pattern);
  }

 private:
  static constexpr uint8_t kPattern = 0xa5;
  static constexpr size_t kMargin = 512;  // more than any vector
  size_t page_ = 0;
  size_t bytes_ = 0;
  uint8_t* base_ = nullptr;
  uint8_t* first_ = nullptr;  // the bytes with the pattern and the span in them
  uint8_t* last_ = nullptr;
  T* data_ = nullptr;
  size_t n_ = 0;
};

}  // namespace gradwire
