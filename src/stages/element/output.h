#pragma once

// Where decoded values go: they are stored in `out`, or added to its values.

#include <cstddef>

#include "gradwire/decode_mode.h"

namespace gradwire {

struct StoreTo {
  float* out;
  void put(float value, size_t i) const { out[i] = value; }
};

struct AddTo {
  float* out;
  void put(float value, size_t i) const { out[i] += value; }
};

namespace scalar {

// Calls body with a StoreTo or an AddTo, as `mode` says.
template <class Body>
auto with_output(float* out, DecodeMode mode, const Body& body) {
  if (mode == DecodeMode::kAdd) return body(AddTo{out});
  return body(StoreTo{out});
}

}  // namespace scalar

}  // namespace gradwire
