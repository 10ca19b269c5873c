// Frames in C.

#include "gradwire/frame.h"

#include "base/return_if_error.h"
#include "capi/arguments.h"
#include "capi/errors.h"
#include "capi/handles.h"

namespace gradwire::capi {

Status check_numel(uint64_t n) {
  if (n <= kMaxNumel) return {};
  return {StatusCode::kLimitExceeded,
          std::to_string(n) + " values are more than the limit of 2^40"};
}

Result<InputView> view_input(const void* x, uint64_t n, gw_dtype dtype) {
  GW_ASSIGN_OR_RETURN(const Dtype type, read_dtype(dtype));
  GW_RETURN_IF_ERROR(check_numel(n));
  GW_RETURN_IF_ERROR(check_given({{"x", x, n}}));
  if (reinterpret_cast<uintptr_t>(x) % size_of(type) != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "x is not aligned to the " + std::to_string(size_of(type)) + " bytes of a value");
  }
  if (type == Dtype::kFloat32) return InputView(std::span(static_cast<const float*>(x), n));
  return InputView(type, std::span(static_cast<const uint16_t*>(x), n));
}

std::span<const std::byte> bytes_at(const void* memory, uint64_t size) {
  return {static_cast<const std::byte*>(memory), size};
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
  return guarded({{"codec", codec}, {"frame", frame}, {"size", size}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(const InputView input, view_input(x, n, dtype));
    DrawContext context;
    if (draw != nullptr) context = {draw->seed, draw->stream, draw->step};
    return with_execution(execution, [&](Execution& how) {
      return finish_encoding(encode_frame(*codec->codec, input, {}, context,
                                          std::span(static_cast<std::byte*>(frame), capacity), how),
                             size);
    });
  });
}

gw_status gw_decode(const void* frame, uint64_t size, float* out, uint64_t n, gw_decode_mode mode,
                    gw_execution* execution) {
  return guarded({{"frame", frame, size}, {"out", out, n}}, [&]() -> Status {
    if (mode != GW_STORE && mode != GW_ADD) {
      return {StatusCode::kInvalidArgument,
              "mode " + std::to_string(mode) + "; valid ones are 0 (GW_STORE) and 1 (GW_ADD)"};
    }
    GW_ASSIGN_OR_RETURN(const Frame parsed, parse_frame(bytes_at(frame, size)));
    return with_execution(execution, [&](Execution& how) {
      return decode_frame(parsed, std::span(out, n),
                          mode == GW_ADD ? DecodeMode::kAdd : DecodeMode::kStore, how);
    });
  });
}

gw_status gw_frame_inspect(const void* frame, uint64_t size, gw_frame_info* info,
                           gw_codec** codec) {
  return guarded({{"frame", frame, size}, {"info", info}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(const Frame found, parse_frame(bytes_at(frame, size)));
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
