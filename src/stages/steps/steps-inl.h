// The steps between two arrays, for one SIMD target. Contracts: stages/kernels.def.

#include <bit>
#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/steps/steps.h"
#include "stages/steps/steps_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// The place of each element in the order, as in stages/steps/steps.h.
template <class D>
HWY_INLINE hn::Vec<D> ordered_lanes(D d, hn::Vec<D> bits, ElementOrder order) {
  if (order == ElementOrder::kInteger) return bits;
  const auto magnitude = hn::Set(d, static_cast<hn::TFromD<D>>(hwy::LimitsMax<hn::TFromD<D>>()));
  return hn::Xor(bits, hn::And(hn::BroadcastSignBit(bits), magnitude));
}

template <class D, typename T>
HWY_INLINE void copy_word(D d, const T* from, T* to) {
  for (size_t i = 0; i < kWordBits; i += hn::Lanes(d)) {
    hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  }
}

// Whether the 64 elements of a word are the same bits.
template <class D, typename T>
HWY_INLINE bool is_same_word(D d, const T* from, const T* to) {
  auto differing = hn::Zero(d);
  for (size_t i = 0; i < kWordBits; i += hn::Lanes(d)) {
    differing = hn::Or(differing, hn::Xor(hn::LoadU(d, from + i), hn::LoadU(d, to + i)));
  }
  return hn::AllTrue(d, hn::Eq(differing, hn::Zero(d)));
}

template <ElementOrder kOrder, typename Bits>
size_t find_steps_in(const StepArrays<Bits>& arrays, size_t n, StepBits steps) {
  using Signed = std::make_signed_t<Bits>;
  const hn::CappedTag<Signed, kWordBits> d;
  const auto* from = reinterpret_cast<const Signed*>(arrays.from);
  const auto* to = reinterpret_cast<const Signed*>(arrays.to);
  auto* before = reinterpret_cast<Signed*>(arrays.before);
  auto* after = reinterpret_cast<Signed*>(arrays.after);
  const auto zero = hn::Zero(d);
  const auto one = hn::Set(d, Signed{1});
  const auto minus_one = hn::Set(d, Signed{-1});
  const size_t whole = n / kWordBits * kWordBits;
  for (size_t at = 0; at < whole; at += kWordBits) {
    const size_t word = at / kWordBits;
    // The hardware's prefetch stops at each page. Of two arrays, one page ahead was the fastest.
    fetch_values(from + at, kPageBytes / sizeof(Bits), kWordBits);
    fetch_values(to + at, kPageBytes / sizeof(Bits), kWordBits);
    if (is_same_word(d, from + at, to + at)) {
      // Not from `to`, which may have changed since.
      if (after != from) copy_word(d, from + at, after + at);
      steps.changed[word] = steps.minus[word] = steps.far[word] = 0;
      continue;
    }
    const auto step_of = [&](auto bits, auto old) HWY_ATTR {
      return hn::Sub(ordered_lanes(d, bits, kOrder), ordered_lanes(d, old, kOrder));
    };
    const auto is_far = [&](auto s)
                            HWY_ATTR { return hn::Or(hn::Gt(s, one), hn::Lt(s, minus_one)); };
    auto* changed = reinterpret_cast<uint8_t*>(steps.changed + word);
    auto* minus = reinterpret_cast<uint8_t*>(steps.minus + word);
    auto* far = reinterpret_cast<uint8_t*>(steps.far + word);
    if (hn::Lanes(d) >= 8) {
      for (size_t i = 0; i < kWordBits; i += hn::Lanes(d)) {
        const auto bits = hn::LoadU(d, to + at + i);
        const auto old = hn::LoadU(d, from + at + i);
        const auto s = step_of(bits, old);
        if (before != nullptr) hn::StoreU(old, d, before + at + i);
        hn::StoreU(bits, d, after + at + i);
        hn::StoreMaskBits(d, hn::Ne(s, zero), changed + i / 8);
        hn::StoreMaskBits(d, hn::Lt(s, zero), minus + i / 8);
        hn::StoreMaskBits(d, is_far(s), far + i / 8);
      }
      continue;
    }
    if (before != nullptr) copy_word(d, from + at, before + at);
    copy_word(d, to + at, after + at);
    const Signed* old = before != nullptr ? before : from;
    const auto step = [&](size_t i) HWY_ATTR {
      return step_of(hn::LoadU(d, after + at + i), hn::LoadU(d, old + at + i));
    };
    store_mask_bits(d, kWordBits, changed,
                    [&](size_t i) HWY_ATTR { return hn::Ne(step(i), zero); });
    store_mask_bits(d, kWordBits, minus, [&](size_t i) HWY_ATTR { return hn::Lt(step(i), zero); });
    store_mask_bits(d, kWordBits, far, [&](size_t i) HWY_ATTR { return is_far(step(i)); });
  }
  const size_t word = whole / kWordBits;
  // Only now: a load of a word directly after the stores of its parts would wait for these.
  size_t count = 0;
  for (size_t i = 0; i < word; ++i) {
    count += static_cast<size_t>(std::popcount(steps.changed[i]));
  }
  return count + scalar::find_steps(arrays.from_element(whole), n - whole, kOrder,
                                    {steps.changed + word, steps.minus + word, steps.far + word});
}

template <typename Bits>
size_t find_steps(const StepArrays<Bits>& arrays, size_t n, ElementOrder order, StepBits steps) {
  if (order == ElementOrder::kFloat) return find_steps_in<ElementOrder::kFloat>(arrays, n, steps);
  return find_steps_in<ElementOrder::kInteger>(arrays, n, steps);
}

size_t find_steps8(const StepArrays<uint8_t>& arrays, size_t n, ElementOrder order,
                   StepBits steps) {
  return find_steps(arrays, n, order, steps);
}
size_t find_steps16(const StepArrays<uint16_t>& arrays, size_t n, ElementOrder order,
                    StepBits steps) {
  return find_steps(arrays, n, order, steps);
}
size_t find_steps32(const StepArrays<uint32_t>& arrays, size_t n, ElementOrder order,
                    StepBits steps) {
  return find_steps(arrays, n, order, steps);
}

template <ElementOrder kOrder, typename Bits>
void move_by_one_in(Bits* first, size_t n, const uint64_t* changed, const uint64_t* minus) {
  using Signed = std::make_signed_t<Bits>;
  const hn::CappedTag<Signed, kWordBits> d;
  auto* values = reinterpret_cast<Signed*>(first);
  const auto one = hn::Set(d, Signed{1});
  const size_t whole = n / kWordBits * kWordBits;
  for (size_t at = 0; at < whole; at += kWordBits) {
    fetch_values(values + at, kPageBytes / sizeof(Bits), kWordBits);
    const uint64_t moved = changed[at / kWordBits];
    if (moved == 0) continue;
    const uint64_t down = minus[at / kWordBits];
    for (size_t i = 0; i < kWordBits; i += hn::Lanes(d)) {
      const auto place = ordered_lanes(d, hn::LoadU(d, values + at + i), kOrder);
      const auto up = hn::IfThenElse(mask_of_bits(d, moved >> i), hn::Add(place, one), place);
      const auto to = hn::IfThenElse(mask_of_bits(d, down >> i), hn::Sub(place, one), up);
      hn::StoreU(ordered_lanes(d, to, kOrder), d, values + at + i);
    }
  }
  scalar::move_by_one(first + whole, n - whole, kOrder, changed + whole / kWordBits,
                      minus + whole / kWordBits);
}

template <typename Bits>
void move_by_one(Bits* values, size_t n, ElementOrder order, const uint64_t* changed,
                 const uint64_t* minus) {
  if (order == ElementOrder::kFloat) {
    move_by_one_in<ElementOrder::kFloat>(values, n, changed, minus);
  } else {
    move_by_one_in<ElementOrder::kInteger>(values, n, changed, minus);
  }
}

void move_by_one8(uint8_t* values, size_t n, ElementOrder order, const uint64_t* changed,
                  const uint64_t* minus) {
  move_by_one(values, n, order, changed, minus);
}
void move_by_one16(uint16_t* values, size_t n, ElementOrder order, const uint64_t* changed,
                   const uint64_t* minus) {
  move_by_one(values, n, order, changed, minus);
}
void move_by_one32(uint32_t* values, size_t n, ElementOrder order, const uint64_t* changed,
                   const uint64_t* minus) {
  move_by_one(values, n, order, changed, minus);
}

void move_by_steps8(uint8_t* values, size_t n, ElementOrder order, const uint32_t* steps) {
  move_each(values, n, order, steps);
}
void move_by_steps16(uint16_t* values, size_t n, ElementOrder order, const uint32_t* steps) {
  move_each(values, n, order, steps);
}
void move_by_steps32(uint32_t* values, size_t n, ElementOrder order, const uint32_t* steps) {
  move_each(values, n, order, steps);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
