#include "capi/cpp_reference.h"

#include <memory>
#include <vector>

#include "engines/loopback/loopback.h"
#include "gradwire/compressor.h"
#include "gradwire/exchange.h"

namespace {

using namespace gradwire;

InputView view(const void* x, uint64_t n, gw_dtype dtype) {
  if (dtype == GW_F32) return InputView(std::span(static_cast<const float*>(x), n));
  return InputView(static_cast<Dtype>(dtype), std::span(static_cast<const uint16_t*>(x), n));
}

std::span<std::byte> bytes(void* data, uint64_t size) {
  return {static_cast<std::byte*>(data), size};
}

}  // namespace

uint64_t cpp_encode(const char* codec, const void* x, uint64_t n, gw_dtype dtype, gw_draw draw,
                    void* frame, uint64_t capacity) {
  Execution execution = Execution::create().value();
  const DrawContext context = {.seed = draw.seed, .stream = draw.stream, .step = draw.step};
  const auto encoded = encode_frame(*Codec::parse(codec).value(), view(x, n, dtype), {}, context,
                                    bytes(frame, capacity), execution);
  return encoded.ok() ? encoded.value().size : 0;
}

uint64_t cpp_compress(const char* codec, const void* x, uint64_t n, gw_dtype dtype, uint64_t seed,
                      uint64_t stream, uint64_t steps, void* frame, uint64_t capacity) {
  Execution execution = Execution::create().value();
  Compressor compressor = Compressor::create(Codec::parse(codec).value(), n, seed, stream).value();
  uint64_t size = 0;
  for (uint64_t step = 0; step < steps; ++step) {
    const auto encoded =
        compressor.encode(view(x, n, dtype), step, bytes(frame, capacity), execution);
    if (!encoded.ok()) return 0;
    size = encoded.value().size;
  }
  return size;
}

int cpp_decode(const void* frame, uint64_t size, float* out, uint64_t n, int add) {
  Execution execution = Execution::create().value();
  const auto parsed = parse_frame({static_cast<const std::byte*>(frame), size});
  if (!parsed.ok()) return 0;
  const DecodeMode mode = add != 0 ? DecodeMode::kAdd : DecodeMode::kStore;
  return decode_frame(parsed.value(), {out, n}, mode, execution).ok() ? 1 : 0;
}

int cpp_average(const char* kind, const char* codec, uint32_t world, float* buckets, uint64_t n,
                uint64_t step) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"weight", {n / 4, 4}}}, world, {.codec = codec}).value());
  std::vector<std::unique_ptr<Exchange>> owned;
  std::vector<Exchange*> exchanges;
  std::vector<std::span<float>> spans;
  for (uint32_t rank = 0; rank < world; ++rank) {
    Execution execution = Execution::create().value();
    owned.push_back(make_exchange(kind, layout, rank, std::move(execution)).value());
    exchanges.push_back(owned.back().get());
    spans.emplace_back(buckets + rank * n, n);
  }
  return run_loopback_step(exchanges, spans, step).ok() ? 1 : 0;
}
