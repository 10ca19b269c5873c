#include "exchange/shards/trit_segments.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/return_if_error.h"
#include "codecs/drawn_ternary.h"
#include "codecs/qsgd/qsgd.h"
#include "codecs/registry.h"
#include "codecs/trit_sums.h"
#include "stages/element/float_bits.h"

namespace gradwire {

TritSegments::TritSegments(const Shards& shards, Execution& execution)
    : shards_(shards), execution_(execution) {
  uint64_t own_size = 0;
  uint64_t scales_size = 0;
  for (uint32_t i = 0; i < shards.layout->segments().size(); ++i) {
    const auto* parameters = parameters_of<TernGradParameters>(push_codec(i));
    trits_.emplace_back();
    if (parameters == nullptr) continue;
    const TernaryShape shape(shards.segment(i).n, parameters->coder, parameters->group_size);
    trits_.back() = {.parameters = *parameters, .shape = shape, .scales_at = scales_size};
    scales_size += shape.groups.count * sizeof(float);
    if (!owns(i)) continue;
    trits_.back()->sums.resize(shards.segment(i).n);
    own_size = std::max(own_size, shape.max_size());
  }
  scales_.resize(scales_size);
  own_payload_.resize(own_size);
}

Result<bool> TritSegments::measure(std::span<std::byte> scales) {
  for (uint32_t i = 0; i < trits_.size(); ++i) {
    const std::span<const float> x = values(i);
    if (!trits_[i] || x.empty()) {
      if (execution_.kernels().absmax(x.data(), {}, x.size()) >= kNonFiniteBits) return false;
      continue;
    }
    Trits& trits = *trits_[i];
    const std::optional<float> limit = measure_scales(trits.shape, trits.parameters.clip, x,
                                                      scales.data() + trits.scales_at, execution_);
    if (!limit) return false;
    trits.limit = *limit;
  }
  return true;
}

Status TritSegments::share(std::span<const std::byte> scales, uint64_t step) {
  std::ranges::copy(scales, scales_.begin());
  for (uint32_t i = 0; i < trits_.size(); ++i) {
    if (!trits_[i] || !owns(i)) continue;
    Trits& trits = *trits_[i];
    std::ranges::fill(trits.sums, int8_t{0});
    const uint64_t size = draw(i, step, own_payload_);
    GW_RETURN_IF_ERROR(add_trits(trits.shape, push_codec(i).info().name,
                                 std::span(own_payload_).first(size), trits.sums, execution_));
  }
  return {};
}

uint64_t TritSegments::draw(uint32_t i, uint64_t step, std::span<std::byte> payload) {
  const Trits& trits = *trits_[i];
  std::copy_n(scales_.data() + trits.scales_at, trits.shape.groups.count * sizeof(float),
              payload.begin());
  const DrawContext draw = {.seed = shards_.seed, .stream = shards_.draw_streams[i], .step = step};
  return draw_with_scales(trits.shape, trits.limit, values(i), draw, payload, execution_);
}

uint64_t TritSegments::encode(uint32_t i, uint64_t step, std::span<std::byte> payload) {
  if (!owns(i)) return draw(i, step, payload);
  const Trits& trits = *trits_[i];
  const Segment& segment = shards_.segment(i);
  const auto& pulled = *parameters_of<QsgdParameters>(*segment.pull_codec);
  return encode_trit_sums(pulled.shape(segment.n), trits.shape.groups,
                          scales_.data() + trits.scales_at, trits.sums, payload, execution_);
}

Status TritSegments::add(uint32_t i, uint32_t source, std::span<const std::byte> payload) {
  Trits& trits = *trits_[i];
  const uint64_t count = trits.shape.groups.count;
  const std::byte* shared = scales_.data() + trits.scales_at;
  const uint64_t size = count * sizeof(float);
  const bool same = all_zero(shared, count)
                        ? payload.empty()
                        : payload.size() >= size && std::memcmp(payload.data(), shared, size) == 0;
  if (!same) {
    const Layout& layout = *shards_.layout;
    return {StatusCode::kPeerMismatch, "rank " + std::to_string(source) + " pushed tensor '" +
                                           layout.tensors()[shards_.segment(i).tensor].name +
                                           "' with other scales than were shared"};
  }
  return add_trits(trits.shape, push_codec(i).info().name, payload, trits.sums, execution_);
}

}  // namespace gradwire
