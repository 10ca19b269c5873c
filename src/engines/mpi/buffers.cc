#include "engines/mpi/buffers.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "stages/kernels.h"

namespace gradwire::mpi {
namespace {

// Values that a thread takes one by one.
constexpr uint64_t kPiece = 65536;

template <typename Body>  // body(first, n)
void for_each_piece(uint64_t n, Execution& execution, const Body& body) {
  execution.for_each((n + kPiece - 1) / kPiece,
                     [&](size_t i) { body(i * kPiece, std::min(kPiece, n - i * kPiece)); });
}

void widen(Dtype dtype, const void* in, uint64_t n, float* out, Execution& execution) {
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

void narrow(Dtype dtype, const float* in, uint64_t n, void* out, Execution& execution) {
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

const std::byte* block_of(const void* buffer, uint64_t first, Dtype dtype) {
  return static_cast<const std::byte*>(buffer) + first * size_of(dtype);
}

}  // namespace

Status Buffers::check(const Request& request, uint32_t world) {
  if (request.count > kMaxNumel / world) {
    return {StatusCode::kLimitExceeded, "more than 2^40 values"};
  }
  if (request.count == 0) return {};
  const bool in_place = request.sendbuf == MPI_IN_PLACE || request.sendbuf == request.recvbuf;
  if (request.recvbuf == nullptr || request.recvbuf == MPI_IN_PLACE || request.sendbuf == nullptr) {
    return {StatusCode::kInvalidArgument, "sendbuf or recvbuf is no buffer"};
  }
  if (in_place) return {};
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
      own_block_(request.collective == Collective::kAllReduce ? 0 : rank * request.count),
      world_(world),
      in_place_(request.sendbuf == MPI_IN_PLACE || request.sendbuf == request.recvbuf),
      factor_(factor) {
  const bool fits = request.collective != Collective::kReduceScatter || in_place_;
  if (request.dtype != Dtype::kFloat32 || !fits) work_.resize(numel());
}

uint64_t Buffers::numel() const noexcept {
  return request_.collective == Collective::kAllReduce ? request_.count : request_.count * world_;
}

std::span<float> Buffers::load(Execution& execution) {
  const bool own_memory = !work_.empty();
  float* bucket = own_memory ? work_.data() : static_cast<float*>(request_.recvbuf);
  if (in_place_ && !own_memory) return {bucket, numel()};
  const void* in = in_place_ ? request_.recvbuf : request_.sendbuf;
  if (request_.collective != Collective::kAllgather) {
    widen(request_.dtype, in, numel(), bucket, execution);
  } else {
    const void* block = in_place_ ? block_of(in, own_block_, request_.dtype) : in;
    widen(request_.dtype, block, request_.count, bucket + own_block_, execution);
  }
  return {bucket, numel()};
}

void Buffers::store(Execution& execution) {
  if (request_.count == 0) return;
  if (factor_ != 1) {
    float* bucket = work_.empty() ? static_cast<float*>(request_.recvbuf) : work_.data();
    for_each_piece(numel(), execution, [&](uint64_t first, uint64_t count) {
      for (uint64_t i = first; i < first + count; ++i) bucket[i] *= factor_;
    });
  }
  if (request_.collective == Collective::kReduceScatter) {
    if (work_.empty()) {
      float* bucket = static_cast<float*>(request_.recvbuf);
      std::memmove(bucket, bucket + own_block_, request_.count * sizeof(float));
    } else {
      narrow(request_.dtype, work_.data() + own_block_, request_.count, request_.recvbuf,
             execution);
    }
  } else if (!work_.empty()) {
    narrow(request_.dtype, work_.data(), numel(), request_.recvbuf, execution);
  }
}

}  // namespace gradwire::mpi
