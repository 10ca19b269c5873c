// Packed trits and zero-run codes to floats, for one SIMD target. Contracts: stages/kernels.h.
//
// A packed byte is a row of five floats in a table, times m. Each row is handled as four lanes and
// one, exactly its own five floats: nothing behind the span is touched, and a load never waits for
// a wider store just before it.

#if defined(GRADWIRE_STAGES_UNPACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_UNPACK_INL_H_
#undef GRADWIRE_STAGES_UNPACK_INL_H_
#else
#define GRADWIRE_STAGES_UNPACK_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "stages/element.h"
#include "stages/load-inl.h"
#include "stages/tables.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

struct StoreRow {
  HWY_INLINE void operator()(uint8_t byte, float m, float* out) const {
    const hn::Full128<float> d;
    const float* row = kRowsToStore.rows[byte];
    hn::StoreU(hn::Mul(hn::Load(d, row), hn::Set(d, m)), d, out);
    out[4] = row[4] * m;
  }
  static float one(float, int trit, float m) { return ternary_value(trit, m); }
  // What a zero run does to its floats.
  static void zeros(float* out, size_t n) { std::memset(out, 0, n * sizeof *out); }
};

struct AddRow {
  HWY_INLINE void operator()(uint8_t byte, float m, float* out) const {
    const hn::Full128<float> d;
    const float* row = kRowsToAdd.rows[byte];
    hn::StoreU(hn::Add(hn::LoadU(d, out), hn::Mul(hn::Load(d, row), hn::Set(d, m))), d, out);
    out[4] += row[4] * m;
  }
  static float one(float sum, int trit, float m) { return ternary_accumulate(sum, trit, m); }
  static void zeros(float*, size_t) {}
};

// A last byte with n < 5 values; false if it is invalid.
template <class Row>
bool unpack_short(uint8_t byte, size_t n, float m, float* out) {
  if (byte > kLargestPackedByte) return false;
  for (size_t place = 0; place < kTritsPerByte; ++place) {
    const int trit = trit_at(byte, static_cast<int>(place));
    if (place < n) {
      out[place] = Row::one(out[place], trit, m);
    } else if (trit != 0) {
      return false;
    }
  }
  return true;
}

template <class Row>
HWY_INLINE bool unpack_rows(const uint8_t* packed, size_t n, float m, float* out) {
  uint8_t largest = 0;
  for (; n >= kTritsPerByte; n -= kTritsPerByte, ++packed, out += kTritsPerByte) {
    Row{}(*packed, m, out);
    largest = HWY_MAX(largest, *packed);
  }
  if (largest > kLargestPackedByte) return false;
  return n == 0 || unpack_short<Row>(*packed, n, m, out);
}

bool unpack(const uint8_t* packed, size_t n, float m, float* out) {
  return unpack_rows<StoreRow>(packed, n, m, out);
}

bool unpack_add(const uint8_t* packed, size_t n, float m, float* out) {
  return unpack_rows<AddRow>(packed, n, m, out);
}

// The codes go by blocks. First, without a branch on them, the bytes that aren't zero are listed
// with their places; then the list is worked off.
template <class Row>
HWY_INLINE bool zero_run_unpack_rows(const uint8_t* codes, size_t size, size_t n, float m,
                                     float* out) {
  constexpr size_t kCodes = 128;
  uint16_t places[kCodes];  // packed bytes from the block's first; at most 127 * 14
  uint8_t bytes[kCodes];
  size_t left = packed_size(n);
  // A code for a last byte that is not whole is kept for the end.
  const size_t short_values = n % kTritsPerByte;
  const bool short_last = short_values != 0 && size != 0 && codes[size - 1] < kRunBase;
  if (short_last) --size;
  for (size_t first = 0; first < size; first += kCodes) {
    const size_t last = HWY_MIN(size, first + kCodes);
    size_t count = 0;
    size_t place = 0;
    for (size_t i = first; i < last; ++i) {
      const size_t info = kCodeInfo.of[codes[i]];
      places[count] = static_cast<uint16_t>(place);
      bytes[count] = codes[i];
      count += info >> 4;
      place += info & 15u;
    }
    // Each code still to come needs a byte at least, so all in the list are whole ones.
    const bool more = short_last || last != size;
    if (place + static_cast<size_t>(more) > left) return false;
    left -= place;
    const size_t values = HWY_MIN(n, place * kTritsPerByte);
    Row::zeros(out, values);
    for (size_t i = 0; i < count; ++i) {
      Row{}(bytes[i], m, out + size_t{places[i]} * kTritsPerByte);
    }
    out += values;
    n -= values;
  }
  if (!short_last) return left == 0;
  return left == 1 && unpack_short<Row>(codes[size], short_values, m, out);
}

bool zero_run_unpack(const uint8_t* codes, size_t size, size_t n, float m, float* out) {
  return zero_run_unpack_rows<StoreRow>(codes, size, n, m, out);
}

bool zero_run_unpack_add(const uint8_t* codes, size_t size, size_t n, float m, float* out) {
  return zero_run_unpack_rows<AddRow>(codes, size, n, m, out);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
