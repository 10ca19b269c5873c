#pragma once

// The step of an element: how many places it moved in the order of its values (spec/format.md,
// Delta). A float moves by units in the last place (ulps), from the negative NaNs over -0 and +0
// to the positive NaNs; an integer by 1. Steps wrap around, so any bits lead to any other.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/base.h"

namespace gradwire {

// How the bits of an element are ordered: integers as two's complement, floats as sign and
// magnitude.
enum class ElementOrder : uint8_t { kInteger = 0, kFloat = 1 };

template <std::unsigned_integral Bits>
inline constexpr Bits kSignBit = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));

// The place of an element in the order, as two's complement; applied twice, its bits again.
template <std::unsigned_integral Bits>
constexpr Bits ordered(Bits bits, ElementOrder order) {
  if (order == ElementOrder::kInteger) return bits;
  const auto negative = static_cast<Bits>(Bits{0} - (bits >> (8 * sizeof(Bits) - 1)));
  return static_cast<Bits>(bits ^ (negative & (kSignBit<Bits> - 1)));
}

// The step from one element to another, modulo 2^width.
template <std::unsigned_integral Bits>
constexpr Bits step_between(Bits from, Bits to, ElementOrder order) {
  return static_cast<Bits>(ordered(to, order) - ordered(from, order));
}

template <std::unsigned_integral Bits>
constexpr Bits step_from(Bits from, Bits step, ElementOrder order) {
  return ordered(static_cast<Bits>(ordered(from, order) + step), order);
}

template <std::unsigned_integral Bits>
constexpr bool is_negative_step(Bits step) {
  return (step & kSignBit<Bits>) != 0;
}

// |step| of two's complement, 1 to 2^(width - 1) for a step that is not 0.
template <std::unsigned_integral Bits>
constexpr Bits step_size(Bits step) {
  return is_negative_step(step) ? static_cast<Bits>(Bits{0} - step) : step;
}

// Moves n elements by steps modulo 2^32. Inlined, so that the compiler makes vectors of it for the
// target of the kernel that calls it.
template <std::unsigned_integral Bits>
HWY_INLINE void move_each(Bits* values, size_t n, ElementOrder order, const uint32_t* steps) {
  if (order == ElementOrder::kFloat) {
    for (size_t i = 0; i < n; ++i) {
      values[i] = step_from(values[i], static_cast<Bits>(steps[i]), ElementOrder::kFloat);
    }
  } else {
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<Bits>(values[i] + steps[i]);
  }
}

// The arrays between which steps are found. Another thread may write to `to` meanwhile: the steps
// are those from `before` to `after`.
template <typename Bits>
struct StepArrays {
  const Bits* from;
  const Bits* to;
  Bits* before;  // gets the elements of `from` in words of 64 with changes; null: `from` stays
  Bits* after;   // gets those of `to`; may be `from` if `before` is not null, or `to`

  [[nodiscard]] StepArrays from_element(size_t i) const {
    return {from + i, to + i, before != nullptr ? before + i : nullptr, after + i};
  }
};

// The steps of an array as bit arrays of trit_words(n) words each: where an element changed, where
// it moved down, and where it moved by more than one place.
struct StepBits {
  uint64_t* changed;
  uint64_t* minus;
  uint64_t* far;
};

}  // namespace gradwire
