// Compressors in C.

#include "gradwire/compressor.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"

using namespace gradwire;
using namespace gradwire::capi;

namespace {

Status check_residual_numel(const Residual& residual, uint64_t n) {
  if (n == residual.size()) return {};
  return {StatusCode::kLengthMismatch, "the residual has " + std::to_string(residual.size()) +
                                           " values, got " + std::to_string(n)};
}

}  // namespace

extern "C" {

gw_status gw_compressor_create(const gw_codec* codec, uint64_t n, uint64_t seed, uint64_t stream,
                               gw_compressor** compressor) {
  return guarded({{"codec", codec}, {"compressor", compressor}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(Compressor made, Compressor::create(codec->codec, n, seed, stream));
    *compressor = new gw_compressor{std::move(made)};
    return {};
  });
}

void gw_compressor_free(gw_compressor* compressor) { delete compressor; }

uint64_t gw_compressor_max_encoded_size(const gw_compressor* compressor) {
  return compressor->compressor.max_encoded_size();
}

gw_status gw_compressor_encode(gw_compressor* compressor, const void* x, uint64_t n, gw_dtype dtype,
                               uint64_t step, void* frame, uint64_t capacity, uint64_t* size,
                               gw_execution* execution) {
  return guarded({{"compressor", compressor}, {"frame", frame}, {"size", size}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(const InputView input, view_input(x, n, dtype));
    return with_execution(execution, [&](Execution& how) {
      return finish_encoding(
          compressor->compressor.encode(input, step,
                                        std::span(static_cast<std::byte*>(frame), capacity), how),
          size);
    });
  });
}

uint64_t gw_compressor_residual_numel(const gw_compressor* compressor) {
  return compressor->compressor.residual().size();
}

gw_status gw_compressor_get_residual(const gw_compressor* compressor, float* values, uint64_t n) {
  return guarded({{"compressor", compressor}}, [&]() -> Status {
    const Residual& residual = compressor->compressor.residual();
    GW_RETURN_IF_ERROR(check_residual_numel(residual, n));
    GW_RETURN_IF_ERROR(check_given({{"values", values, n}}));
    std::ranges::copy(residual.values(), values);
    return {};
  });
}

gw_status gw_compressor_set_residual(gw_compressor* compressor, const float* values, uint64_t n) {
  return guarded({{"compressor", compressor}}, [&]() -> Status {
    Residual& residual = compressor->compressor.residual();
    GW_RETURN_IF_ERROR(check_residual_numel(residual, n));
    GW_RETURN_IF_ERROR(check_given({{"values", values, n}}));
    const std::span<const float> given(values, n);
    const auto bad = std::ranges::find_if(given, [](float v) { return !std::isfinite(v); });
    if (bad != given.end()) {
      return {StatusCode::kNonFinite,
              "value " + std::to_string(bad - given.begin()) + " of the residual is not finite"};
    }
    residual.assign(given);
    return {};
  });
}

}  // extern "C"
