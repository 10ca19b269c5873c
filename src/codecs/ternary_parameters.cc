#include "codecs/ternary_parameters.h"

#include <algorithm>
#include <cmath>

namespace gradwire {
namespace {

constexpr uint16_t kCoderMask = 3;
constexpr int kNumberShift = 2;
constexpr long kLargestNumber = UINT16_MAX >> kNumberShift;

}  // namespace

Result<TernaryCoder> parse_coder(const Parameters& given, TernaryCoder otherwise) {
  Result<size_t> coder =
      given.choice("coder", {"none", "zre", "rice"}, static_cast<size_t>(otherwise));
  if (!coder.ok()) return coder.status();
  return static_cast<TernaryCoder>(coder.value());
}

void append_coder(std::string& text, TernaryCoder coder, TernaryCoder otherwise) {
  if (coder == otherwise) return;
  if (coder == TernaryCoder::kNone) append_parameter(text, "coder", "none");
  if (coder == TernaryCoder::kZeroRun) append_parameter(text, "coder", "zre");
  if (coder == TernaryCoder::kRice) append_parameter(text, "coder", "rice");
}

uint16_t tell_number(TernaryCoder coder, float number, float units) {
  const long told = std::min(std::lround(number * units), kLargestNumber);
  return static_cast<uint16_t>(static_cast<long>(coder) | told << kNumberShift);
}

TernaryCoder told_coder(uint16_t param_a) {
  return static_cast<TernaryCoder>(param_a & kCoderMask);
}

float told_number(uint16_t param_a, float units, float steps) {
  const float told = static_cast<float>(param_a >> kNumberShift) / units;
  return std::round(told * steps) / steps;
}

}  // namespace gradwire
