#pragma once

// The steps of a sparse chunk that go further than one place.

#include <cstddef>
#include <cstdint>

namespace gradwire {

// Far steps in the order of their elements.
struct FarSteps {
  // No sparse chunk has more: an encoder makes sparse chunks of at most a quarter of changes.
  static constexpr size_t kMost = 16384;

  size_t count = 0;
  uint16_t gaps[kMost];   // changed elements between the far step before and this one
  uint32_t sizes[kMost];  // |step|, at least 2
};

// How a list is coded: Golomb-Rice parameter of the gaps, and order of the sizes' Exp-Golomb code.
struct FarCode {
  int gap_k = 0;
  int size_k = 0;
  uint64_t bytes = 1;
};

// The parameters that take the fewest bits among those that the means suggest.
FarCode choose_far_code(const FarSteps& far);

// Writes code.bytes bytes, and up to 8 after them. Returns the end.
uint8_t* write_far_steps(const FarSteps& far, const FarCode& code, uint8_t* out);

// Reads the list at the beginning of the bytes. Returns how many bytes it takes, 0 if they are not
// valid: a gap reaches beyond `most` changed elements or a size beyond `largest`.
size_t read_far_steps(const uint8_t* bytes, size_t size, size_t most, uint32_t largest,
                      FarSteps& far);

}  // namespace gradwire
