// Elias coding of levels by tables, for one SIMD target. Contracts: stages/kernels.def.

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/elias/elias_tables.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// The first byte is the highest.
HWY_INLINE uint64_t big_endian(uint64_t bytes) { return __builtin_bswap64(bytes); }

// Writes eight bytes at a time, and no byte after the last.
class BitSink {
 public:
  HWY_INLINE explicit BitSink(uint8_t* out) : begin_(out), out_(out) {}

  HWY_INLINE void put(BitCode code) {
    if (code.length < free_) {
      bits_ = bits_ << code.length | code.bits;
      free_ -= code.length;
      return;
    }
    const int left = code.length - free_;
    store(bits_ << free_ | code.bits >> left);
    out_ += 8;
    bits_ = code.bits;  // what has been stored is shifted out
    free_ = 64 - left;
  }

  HWY_INLINE size_t finish() {
    const size_t bytes = static_cast<size_t>(64 - free_ + 7) / 8;
    if (bytes != 0) {
      const uint64_t last = big_endian(bits_ << free_);
      std::memcpy(out_, &last, bytes);
    }
    return static_cast<size_t>(out_ - begin_) + bytes;
  }

 private:
  HWY_INLINE void store(uint64_t bits) {
    const uint64_t bytes = big_endian(bits);
    std::memcpy(out_, &bytes, sizeof bytes);
  }

  uint8_t* begin_;
  uint8_t* out_;
  uint64_t bits_ = 0;  // the bits that are not stored yet, at the lower end
  int free_ = 64;      // above 0
};

// Reads any number of bits; zeros after the end.
class BitSource {
 public:
  HWY_INLINE BitSource(const uint8_t* coded, size_t size) : coded_(coded), size_(size) {}

  // The next 57 bits or more, from the highest on.
  HWY_INLINE uint64_t window() const {
    const size_t byte = at_ / 8;
    uint64_t bytes = 0;
    if (HWY_LIKELY(byte + 8 <= size_)) {
      std::memcpy(&bytes, coded_ + byte, sizeof bytes);
    } else if (byte < size_) {
      std::memcpy(&bytes, coded_ + byte, size_ - byte);
    }
    return big_endian(bytes) << at_ % 8;
  }

  HWY_INLINE void skip(int bits) { at_ += static_cast<size_t>(bits); }

  // Whether less than a byte is left, and zeros.
  HWY_INLINE bool at_end() const {
    return (at_ + 7) / 8 == size_ && (at_ % 8 == 0 || window() == 0);
  }

 private:
  const uint8_t* coded_;
  size_t size_;
  size_t at_ = 0;
};

// Bit i: levels[i] is not 0, of 64.
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
  BitSink sink(out);
  size_t next = 0;  // the place after the last level that was not 0
  const auto put_block = [&](size_t first, const int8_t* block) HWY_ATTR {
    for (uint64_t bits = nonzero_bits(block); bits != 0; bits &= bits - 1) {
      const size_t i = hwy::Num0BitsBelowLS1Bit_Nonzero64(bits);
      const auto level = static_cast<uint8_t>(block[i]);
      sink.put(concatenate(distance_code(first + i + 1 - next), kEliasCodes.sparse[level]));
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
  sink.put(distance_code(n + 1 - next));
  return sink.finish();
}

size_t encode_dense_levels(const int8_t* levels, size_t n, uint8_t* out) {
  BitSink sink(out);
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const auto code = [=](size_t place) HWY_ATTR {
      return kEliasCodes.dense[static_cast<uint8_t>(levels[i + place])];
    };
    // Four codes have at most 60 bits.
    sink.put(concatenate(concatenate(code(0), code(1)), concatenate(code(2), code(3))));
  }
  for (; i < n; ++i) sink.put(kEliasCodes.dense[static_cast<uint8_t>(levels[i])]);
  return sink.finish();
}

bool decode_sparse_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels) {
  if (n != 0) std::memset(levels, 0, n);
  BitSource source(coded, size);
  for (size_t i = 0;;) {
    uint64_t window = source.window();
    const SparseEntry entry = kSparseTable.of[window >> (64 - SparseTable::kBits)];
    if (HWY_LIKELY(entry.length != 0 && entry.distance <= n - i)) {
      const int level = entry.level;
      if ((level < 0 ? -level : level) > s) return false;
      i += entry.distance;
      levels[i - 1] = entry.level;
      source.skip(entry.length);
      continue;
    }
    const EliasNumber distance = elias_read(window);
    if (distance.length == 0 || distance.value > n + 1 - i) return false;
    i += distance.value;
    source.skip(distance.length);
    if (i > n) return source.at_end();
    window <<= distance.length;
    const EliasNumber magnitude = elias_read(window << 1);
    if (magnitude.length == 0 || magnitude.value > static_cast<uint32_t>(s)) return false;
    const int level = static_cast<int>(magnitude.value);
    levels[i - 1] = static_cast<int8_t>(window >> 63 != 0 ? -level : level);
    source.skip(1 + magnitude.length);
  }
}

// Whether a level is beyond -s to s.
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
  bool beyond = !hn::AllFalse(d, hn::Or(hn::Gt(most, high), hn::Lt(least, low)));
  for (; i < n; ++i) beyond |= levels[i] > s || levels[i] < -s;
  return beyond;
}

bool decode_dense_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels) {
  BitSource source(coded, size);
  for (size_t i = 0; i < n;) {
    const uint64_t window = source.window();
    const DenseEntry& entry = kDenseTable.of[window >> (64 - DenseTable::kBits)];
    if (HWY_LIKELY(entry.count != 0 && n - i >= sizeof entry)) {
      std::memcpy(levels + i, &entry, sizeof entry);  // the last two bytes are overwritten
      i += entry.count;
      source.skip(entry.length);
      continue;
    }
    const EliasNumber number = elias_read(window);
    if (number.length == 0 || number.value > static_cast<uint32_t>(s) + 1) return false;
    const bool has_sign = number.value > 1;
    const bool negative = has_sign && (window << number.length >> 63) != 0;
    const int level = static_cast<int>(number.value) - 1;
    levels[i++] = static_cast<int8_t>(negative ? -level : level);
    source.skip(number.length + (has_sign ? 1 : 0));
  }
  return source.at_end() && !any_beyond(levels, n, s);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
