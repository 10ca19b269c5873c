// Frames in C.

#include "gradwire/frame.h"

#include <utility>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"

namespace gradwire::capi {

Result<InputView> view_input(const void* x, uint64_t n, gw_dtype dtype) {
  if (dtype != GW_F32 && dtype != GW_BF16 && dtype != GW_F16) {
    return Status(StatusCode::kUnsupportedDtype,
                  "dtype " + std::to_string(dtype) +
                      "; valid ones are 0 (GW_F32), 1 (GW_BF16) and 2 (GW_F16)");
  }
  if (n > kMaxNumel) {
    return Status(StatusCode::kLimitExceeded,
                  std::to_string(n) + " values are more than the limit of 2^40");
  }
  GW_RETURN_IF_ERROR(check_values("x", x, n));
  const auto type = static_cast<Dtype>(dtype);
  if (reinterpret_cast<uintptr_t>(x) % size_of(type) != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "x is not aligned to the " + std::to_string(size_of(type)) + " bytes of a value");
  }
  if (type == Dtype::kFloat32) return InputView(std::span(static_cast<const float*>(x), n));
  return InputView(type, std::span(static_cast<const uint16_t*>(x), n));
}

Status finish_encoding(const Result<EncodedFrame>& encoded, uint64_t* size) {
  if (!encoded.ok()) return encoded.status();
  *size = encoded.value().size;
  return encoded.value().non_finite;
}

}  // namespace gradwire::capi

using namespace gradwire;
using namespace gradwire::capi;

extern "C" {

gw_status gw_encode(const gw_codec* codec, const void* x, uint64_t n, gw_dtype dtype,
                    const gw_draw* draw, void* frame, uint64_t capacity, uint64_t* size,
                    gw_execution* execution) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("codec", codec));
    GW_RETURN_IF_ERROR(check_given("frame", frame));
    GW_RETURN_IF_ERROR(check_given("size", size));
    const Result<InputView> input = view_input(x, n, dtype);
    if (!input.ok()) return input.status();
    const DrawContext context =
        draw == nullptr
            ? DrawContext()
            : DrawContext{.seed = draw->seed, .stream = draw->stream, .step = draw->step};
    return with_execution(execution, [&](Execution& how) {
      return finish_encoding(encode_frame(*codec->codec, input.value(), {}, context,
                                          std::span(static_cast<std::byte*>(frame), capacity), how),
                             size);
    });
  });
}

gw_status gw_decode(const void* frame, uint64_t size, float* out, uint64_t n, gw_decode_mode mode,
                    gw_execution* execution) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_values("frame", frame, size));
    GW_RETURN_IF_ERROR(check_values("out", out, n));
    if (mode != GW_STORE && mode != GW_ADD) {
      return {StatusCode::kInvalidArgument,
              "mode " + std::to_string(mode) + "; valid ones are 0 (GW_STORE) and 1 (GW_ADD)"};
    }
    const Result<Frame> parsed = parse_frame(std::span(static_cast<const std::byte*>(frame), size));
    if (!parsed.ok()) return parsed.status();
    return with_execution(execution, [&](Execution& how) {
      return decode_frame(parsed.value(), std::span(out, n),
                          mode == GW_ADD ? DecodeMode::kAdd : DecodeMode::kStore, how);
    });
  });
}

gw_status gw_frame_inspect(const void* frame, uint64_t size, gw_frame_info* info,
                           gw_codec** codec) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_values("frame", frame, size));
    GW_RETURN_IF_ERROR(check_given("info", info));
    const Result<Frame> parsed = parse_frame(std::span(static_cast<const std::byte*>(frame), size));
    if (!parsed.ok()) return parsed.status();
    const Frame& found = parsed.value();
    if (codec != nullptr) *codec = new gw_codec{found.codec, found.codec->wire_text()};
    *info = {.n = found.n,
             .payload_size = found.payload.size(),
             .checksum = found.checksum,
             .dtype = static_cast<gw_dtype>(found.dtype),
             .non_finite = found.content == FrameContent::kNonFinite ? 1 : 0};
    return {};
  });
}

}  // extern "C"
