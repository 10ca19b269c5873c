// The common part of all codecs: checks at the edge, and undoing error feedback.

#include "gradwire/codec.h"

#include <algorithm>
#include <cmath>

#include "base/return_if_error.h"
#include "base/standard_arithmetic.h"
#include "codecs/checks.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "codecs/parameters.h"
#include "stages/element/float_bits.h"

namespace gradwire {
namespace {

Status check_residual_size(const CodecInfo& info, uint64_t n, const ResidualView& residual) {
  if (residual.type() == ResidualType::kNone || residual.size() == n) return {};
  return {StatusCode::kLengthMismatch, std::string(info.name) + ": the residual has " +
                                           std::to_string(residual.size()) + " values, the input " +
                                           std::to_string(n)};
}

Status check_payload_room(const Codec& codec, uint64_t n, uint64_t room) {
  if (n > kMaxNumel) {
    return {StatusCode::kLimitExceeded,
            std::to_string(n) + " values are more than the limit of " + std::to_string(kMaxNumel)};
  }
  const uint64_t needed = codec.max_payload_size(n);
  if (room >= needed) return {};
  return {StatusCode::kBufferTooSmall, std::string(codec.info().name) + ": " + std::to_string(n) +
                                           " values need room for " + std::to_string(needed) +
                                           " bytes of payload, got " + std::to_string(room)};
}

}  // namespace

Result<Measurement> Codec::measure(const InputView& x, const ResidualView& residual,
                                   Execution& execution,
                                   std::span<const Measurement> chunks) const {
  const StandardArithmetic arithmetic;
  GW_RETURN_IF_ERROR(check_residual_size(info(), x.size(), residual));
  if (x.empty()) return Measurement{.complete = true};
  return measure_values(Input(x, residual, execution.kernels()), chunks, execution);
}

bool Codec::measures_chunks(uint64_t) const noexcept { return false; }

Measurement Codec::measure_chunk(const InputView& x, const ResidualView& residual, uint64_t begin,
                                 Execution& execution) const {
  const StandardArithmetic arithmetic;
  return measure_part(Input(x, residual, execution.kernels()), begin,
                      std::min(kChunkValues, x.size() - begin));
}

Result<uint64_t> Codec::encode(const InputView& x, const ResidualView& residual,
                               const DrawContext& draw, std::span<std::byte> payload,
                               Execution& execution, const Measurement& measurement,
                               std::span<float> decoded) const {
  const StandardArithmetic arithmetic;
  GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
  GW_RETURN_IF_ERROR(check_residual_size(info(), x.size(), residual));
  if (x.empty()) return 0;
  // A lossless codec leaves nothing over, so it has no use for a residual.
  const Input input(x, info().lossless ? ResidualView() : residual, execution.kernels());
  Measurement measured = measurement;
  if (!measured.complete && (!info().carries_non_finite || input.keeps_residual())) {
    GW_ASSIGN_OR_RETURN(measured, measure_values(input, {}, execution));
  }
  Result<uint64_t> size = encode_values(input, measured, draw, payload, execution, decoded);
  if (size.ok() && size.value() == 0) std::ranges::fill(decoded, 0.0f);
  return size;
}

Status Codec::decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                     Execution& execution, const AfterChunk& after) const {
  const StandardArithmetic arithmetic;
  GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
  if (!payload.empty()) return decode_values(payload, out, mode, execution, after);
  // An empty payload stands for values that are all +0.
  if (mode == DecodeMode::kStore) std::fill(out.begin(), out.end(), 0.0f);
  for (uint64_t begin = 0; after && begin < out.size(); begin += kChunkValues) {
    after(begin, std::min(kChunkValues, out.size() - begin));
  }
  return {};
}

Status Codec::restore(std::span<const std::byte> payload, const InputView& x,
                      const ResidualView& residual, Execution& execution) const {
  const StandardArithmetic arithmetic;
  GW_RETURN_IF_ERROR(check_residual_size(info(), x.size(), residual));
  if (residual.type() == ResidualType::kNone) return {};
  std::vector<float> decoded(x.size());
  GW_RETURN_IF_ERROR(decode(payload, decoded, DecodeMode::kStore, execution));
  Input(x, residual, execution.kernels()).restore(0, x.size(), decoded.data());
  return {};
}

Result<Measurement> Codec::measure_values(const Input& input, std::span<const Measurement>,
                                          Execution&) const {
  Measurement found = measure_part(input, 0, input.size());
  if (found.largest >= refused_magnitude(input.residual().type())) return refuse(input);
  found.complete = true;
  return found;
}

Measurement Codec::measure_part(const Input& input, uint64_t begin, uint64_t n) const {
  return {.largest = input.absmax(begin, n)};
}

uint32_t Codec::refused_magnitude(ResidualType) const noexcept { return kNonFiniteBits; }

std::optional<uint64_t> Codec::find_non_finite(const InputView& x, const ResidualView& residual,
                                               Execution& execution) const {
  const StandardArithmetic arithmetic;
  return find_refused(Input(x, residual, execution.kernels()));
}

std::optional<uint64_t> Codec::find_refused(const Input& input) const {
  const uint32_t refused = refused_magnitude(input.residual().type());
  for (uint64_t i = 0; i < input.size(); ++i) {
    if (magnitude_bits(input.at(i)) >= refused) return i;
  }
  return std::nullopt;
}

Status Codec::refuse(const Input& input) const {
  const std::optional<uint64_t> element = find_refused(input);
  if (!element) return changed_meanwhile(info());
  const float value = value_of(input.x(), *element);
  const char* what = std::isnan(value)                ? " is NaN"
                     : std::isinf(value)              ? " is infinite"
                     : std::isnan(input.at(*element)) ? " has a residual that is NaN"
                                                      : " is too large once the residual is added";
  return {StatusCode::kNonFinite,
          std::string(info().name) + ": element " + std::to_string(*element) + what};
}

std::string Codec::wire_text() const {
  const std::string keys = parameter_text();
  return std::string(info().name) + (keys.empty() ? "" : ":" + keys);
}

std::string Codec::text() const {
  std::string keys = parameter_text();
  const bool feedback = residual_type_ != ResidualType::kNone;
  if (feedback != info().error_feedback) append_parameter(keys, "ef", feedback ? "on" : "off");
  if (residual_type_ == ResidualType::kBfloat16) append_parameter(keys, "residual", "bf16");
  std::string text(info().name);
  if (!keys.empty()) text += ':' + keys;
  return text;
}

}  // namespace gradwire
