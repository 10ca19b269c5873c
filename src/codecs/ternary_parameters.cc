#include "codecs/ternary_parameters.h"

#include <algorithm>
#include <cmath>

namespace gradwire {
namespace {

constexpr uint16_t kCoderMask = 3;
constexpr int kNumberShift = 2;
constexpr long kLargestNumber = UINT16_MAX >> kNumberShift;

}  // namespace

uint16_t pack_param_a(TernaryCoder coder, float number, float units) {
  const long stated = std::min(std::lround(number * units), kLargestNumber);
  return static_cast<uint16_t>(static_cast<long>(coder) | stated << kNumberShift);
}

TernaryCoder stated_coder(uint16_t param_a) {
  return static_cast<TernaryCoder>(param_a & kCoderMask);
}

double stated_number(uint16_t param_a, double units, double steps) {
  return std::round((param_a >> kNumberShift) / units * steps) / steps;
}

}  // namespace gradwire
