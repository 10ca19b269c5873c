// Elias coding of levels by tables, for one SIMD target. Contracts: stages/kernels.def.

#include <cstdlib>
#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/elias/elias_bits.h"
#include "stages/elias/elias_tables.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// Bit i is set where levels[i] is not 0, for 64 levels.
HWY_INLINE uint64_t nonzero_bits(const int8_t* levels) {
  const hn::CappedTag<int8_t, 64> d;
  uint64_t bits = 0;
  for (size_t i = 0; i < 64; i += hn::Lanes(d)) {
    bits |= bits_of_mask(d, hn::Ne(hn::LoadU(d, levels + i), hn::Zero(d))) << i;
  }
  return bits;
}

HWY_INLINE BitCode distance_code(size_t distance) {
  if (HWY_LIKELY(distance < EliasCodes::kDistances)) return kEliasCodes.distance[distance];
  return elias_code(static_cast<uint32_t>(distance));
}

size_t encode_sparse_levels(const int8_t* levels, size_t n, uint8_t* out) {
  EliasWriter writer(out);
  size_t next = 0;  // the place after the last level that was not 0
  const auto put_block = [&](size_t first, const int8_t* block) HWY_ATTR {
    for (uint64_t bits = nonzero_bits(block); bits != 0; bits &= bits - 1) {
      const size_t i = hwy::Num0BitsBelowLS1Bit_Nonzero64(bits);
      const auto level = static_cast<uint8_t>(block[i]);
      writer.put(concatenate(distance_code(first + i + 1 - next), kEliasCodes.sparse[level]));
      next = first + i + 1;
    }
  };
  size_t i = 0;
  for (; i + 64 <= n; i += 64) put_block(i, levels + i);
  if (i < n) {
    int8_t last[64] = {};
    std::memcpy(last, levels + i, n - i);
    put_block(i, last);
  }
  writer.put(distance_code(n + 1 - next));
  return writer.finish();
}

size_t encode_dense_levels(const int8_t* levels, size_t n, uint8_t* out) {
  EliasWriter writer(out);
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const auto code = [=](size_t place) HWY_ATTR {
      return kEliasCodes.dense[static_cast<uint8_t>(levels[i + place])];
    };
    // Four codes have at most 60 bits.
    writer.put(concatenate(concatenate(code(0), code(1)), concatenate(code(2), code(3))));
  }
  for (; i < n; ++i) writer.put(kEliasCodes.dense[static_cast<uint8_t>(levels[i])]);
  return writer.finish();
}

bool decode_sparse_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels) {
  if (n != 0) std::memset(levels, 0, n);
  EliasReader reader(coded, size);
  for (size_t i = 0;;) {
    const uint64_t window = reader.window();
    const SparseEntry entry = kSparseTable.of[window >> (64 - SparseTable::kBits)];
    if (HWY_LIKELY(entry.length != 0 && entry.distance <= n - i)) {
      if (std::abs(entry.level) > s) return false;
      i += entry.distance;
      levels[i - 1] = entry.level;
      reader.skip(entry.length);
      continue;
    }
    const EliasNumber distance = elias_read(window);
    if (distance.length == 0 || distance.value > n + 1 - i) return false;
    i += distance.value;
    reader.skip(distance.length);
    if (i > n) return reader.at_end();
    // For a level too long for the table, this is faster than sparse_level_read.
    const uint64_t code = window << distance.length;
    const EliasNumber magnitude = elias_read(code << 1);
    if (magnitude.length == 0 || magnitude.value > static_cast<uint32_t>(s)) return false;
    const auto level = static_cast<int8_t>(magnitude.value);
    levels[i - 1] = static_cast<int8_t>(code >> 63 != 0 ? -level : level);
    reader.skip(1 + magnitude.length);
  }
}

// Whether any level is outside -s to s.
HWY_INLINE bool any_beyond(const int8_t* levels, size_t n, int32_t s) {
  const hn::ScalableTag<int8_t> d;
  const auto high = hn::Set(d, static_cast<int8_t>(s));
  const auto low = hn::Set(d, static_cast<int8_t>(-s));
  auto most = hn::Zero(d);
  auto least = hn::Zero(d);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, levels + i);
    most = hn::Max(most, v);
    least = hn::Min(least, v);
  }
  // g++ 12 compiles Or of these two masks wrongly for SVE of 256 bits.
  bool beyond = !hn::AllFalse(d, hn::Gt(most, high)) || !hn::AllFalse(d, hn::Lt(least, low));
  for (; i < n; ++i) beyond |= levels[i] > s || levels[i] < -s;
  return beyond;
}

bool decode_dense_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels) {
  EliasReader reader(coded, size);
  for (size_t i = 0; i < n;) {
    const uint64_t window = reader.window();
    const DenseEntry& entry = kDenseTable.of[window >> (64 - DenseTable::kBits)];
    if (HWY_LIKELY(entry.count != 0 && n - i >= sizeof entry)) {
      std::memcpy(levels + i, &entry, sizeof entry);  // the last two bytes are overwritten
      i += entry.count;
      reader.skip(entry.length);
      continue;
    }
    const EliasLevel level = dense_level_read(window);
    if (level.length == 0 || std::abs(level.level) > s) return false;
    levels[i++] = static_cast<int8_t>(level.level);
    reader.skip(level.length);
  }
  return reader.at_end() && !any_beyond(levels, n, s);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
