#include "engines/mpi/buffers.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/return_if_error.h"
#include "base/standard_arithmetic.h"
#include "engines/mpi/device.h"
#include "stages/kernels.h"

namespace gradwire::mpi {
namespace {

// Threads copy and convert values in pieces of so many.
constexpr uint64_t kPiece = 65536;

template <typename Body>  // body(first, n)
void for_each_piece(uint64_t n, Execution& execution, const Body& body) {
  execution.for_each((n + kPiece - 1) / kPiece,
                     [&](size_t i) { body(i * kPiece, std::min(kPiece, n - i * kPiece)); });
}

void widen(Dtype dtype, const void* in, uint64_t n, float* out, Execution& execution) {
  const StandardArithmetic arithmetic;
  const Kernels& kernels = execution.kernels();
  for_each_piece(n, execution, [&](uint64_t first, uint64_t count) {
    if (dtype == Dtype::kFloat32) {
      std::memcpy(out + first, static_cast<const float*>(in) + first, count * sizeof(float));
      return;
    }
    const uint16_t* bits = static_cast<const uint16_t*>(in) + first;
    (dtype == Dtype::kBfloat16 ? kernels.widen_bf16 : kernels.widen_f16)(bits, count, out + first,
                                                                         DecodeMode::kStore);
  });
}

void scale(float* values, uint64_t n, float factor, Execution& execution) {
  const StandardArithmetic arithmetic;
  for_each_piece(n, execution, [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) values[i] *= factor;
  });
}

void narrow(Dtype dtype, const float* in, uint64_t n, void* out, Execution& execution) {
  const StandardArithmetic arithmetic;
  const Kernels& kernels = execution.kernels();
  for_each_piece(n, execution, [&](uint64_t first, uint64_t count) {
    if (dtype == Dtype::kFloat32) {
      std::memcpy(static_cast<float*>(out) + first, in + first, count * sizeof(float));
      return;
    }
    uint16_t* bits = static_cast<uint16_t*>(out) + first;
    (dtype == Dtype::kBfloat16 ? kernels.narrow_bf16 : kernels.narrow_f16)(in + first, count, bits);
  });
}

}  // namespace

Status Buffers::check(const Request& request, uint32_t world) {
  if (request.count > kMaxNumel / world) {
    return {StatusCode::kLimitExceeded, "more than 2^40 values"};
  }
  if (request.count == 0) return {};
  if (request.recvbuf == nullptr || request.recvbuf == MPI_IN_PLACE || request.sendbuf == nullptr) {
    return {StatusCode::kInvalidArgument, "sendbuf or recvbuf is no buffer"};
  }
  if (request.in_place()) return {};
  const uint64_t block = request.count * size_of(request.dtype);
  const std::byte* send = static_cast<const std::byte*>(request.sendbuf);
  const std::byte* receive = static_cast<const std::byte*>(request.recvbuf);
  const uint64_t send_size =
      request.collective == Collective::kReduceScatter ? block * world : block;
  const uint64_t receive_size =
      request.collective == Collective::kAllgather ? block * world : block;
  if (send < receive + receive_size && receive < send + send_size) {
    return {StatusCode::kInvalidArgument,
            "sendbuf and recvbuf overlap; MPI_IN_PLACE is for input and output in one place"};
  }
  return {};
}

Buffers::Buffers(const Request& request, uint32_t rank, uint32_t world, float factor)
    : request_(request),
      numel_(request.collective == Collective::kAllReduce ? request.count : request.count * world),
      own_block_(request.collective == Collective::kAllReduce ? 0 : rank * request.count),
      factor_(factor) {
  const bool fits = request.collective != Collective::kReduceScatter || request.in_place();
  if (request.dtype != Dtype::kFloat32 || !fits) work_.resize(numel_);
  if (request.count == 0) return;
  const uint64_t block = request.count;
  const bool in_place = request.in_place();
  if (!in_place) {
    const uint64_t n = request.collective == Collective::kReduceScatter ? numel_ : block;
    request_.sendbuf = stage(request.sendbuf, n, staged_input_);
  }
  const bool one_block = request.collective == Collective::kReduceScatter && !in_place;
  request_.recvbuf = stage(request.recvbuf, one_block ? block : numel_, staged_output_);
  if (in_place) request_.sendbuf = MPI_IN_PLACE;
}

void* Buffers::stage(const void* buffer, uint64_t values, Staged& staged) {
  void* const given = const_cast<void*>(buffer);
  if (!is_on_device(buffer)) return given;
  staged.device = given;
  staged.host.resize(values * size_of(request_.dtype));
  return staged.host.data();
}

float* Buffers::bucket() noexcept {
  return work_.empty() ? static_cast<float*>(request_.recvbuf) : work_.data();
}

Result<std::span<float>> Buffers::load(Execution& execution) {
  for (Staged* staged : {&staged_input_, &staged_output_}) {
    const bool is_input = staged == &staged_input_ || request_.in_place();
    if (staged->device == nullptr || !is_input) continue;
    GW_RETURN_IF_ERROR(copy_from_device(staged->device, staged->host.size(), staged->host.data()));
  }
  if (!request_.in_place() || !work_.empty()) {
    const bool one_block = request_.collective == Collective::kAllgather;
    const uint64_t first = one_block ? own_block_ : 0;
    const void* in = request_.sendbuf;
    if (request_.in_place()) {
      in = static_cast<const std::byte*>(request_.recvbuf) + first * size_of(request_.dtype);
    }
    widen(request_.dtype, in, one_block ? request_.count : numel_, bucket() + first, execution);
  }
  return std::span(bucket(), numel_);
}

Status Buffers::store(Execution& execution) {
  if (request_.count == 0) return {};
  float* const values = bucket();
  if (factor_ != 1) scale(values, numel_, factor_, execution);
  const bool one_block = request_.collective == Collective::kReduceScatter;
  const float* result = values + (one_block ? own_block_ : 0);
  const uint64_t n = one_block ? request_.count : numel_;
  if (!work_.empty()) {
    narrow(request_.dtype, result, n, request_.recvbuf, execution);
  } else if (result != values) {
    std::memmove(values, result, n * sizeof(float));
  }
  if (staged_output_.device == nullptr) return {};
  return copy_to_device(staged_output_.host.data(), staged_output_.host.size(),
                        staged_output_.device);
}

}  // namespace gradwire::mpi
