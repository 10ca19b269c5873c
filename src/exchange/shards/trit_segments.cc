#include "exchange/shards/trit_segments.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "base/standard_arithmetic.h"
#include "codecs/drawn_ternary.h"
#include "codecs/qsgd/qsgd.h"
#include "codecs/registry.h"
#include "stages/element/float_bits.h"

namespace gradwire {

TritSegments::TritSegments(const Shards& shards, Execution& execution)
    : shards_(shards), execution_(execution) {
  uint64_t own_size = 0;
  uint64_t scales_size = 0;
  trits_.resize(shards.layout->segments().size());
  for (const std::vector<uint32_t>& segments : shards.segments) {
    const uint64_t begin = scales_size;
    for (uint32_t i : segments) {
      const auto* parameters = parameters_of<TernGradParameters>(push_codec(i));
      if (parameters == nullptr) continue;
      const TernaryShape shape(shards.segment(i).n, parameters->coder, parameters->group_size);
      trits_[i] = {.parameters = *parameters, .shape = shape, .scales_at = scales_size};
      scales_size += shape.groups.count * sizeof(float);
      if (!owns(i)) continue;
      trits_[i]->sums = TritSums(shards.segment(i).n, shards.layout->workers());
      if (shards.is_worker()) own_size = std::max(own_size, shape.max_size());
    }
    ranges_.push_back({.begin = begin, .size = scales_size - begin});
  }
  scales_.resize(scales_size);
  own_payload_.resize(own_size);
}

Result<bool> TritSegments::measure(std::span<std::byte> scales) {
  const StandardArithmetic arithmetic;
  const std::vector<Segment>& segments = shards_.layout->segments();
  for (uint32_t first = 0, end = 0; first < segments.size(); first = end) {
    while (end < segments.size() && segments[end].tensor == segments[first].tensor) ++end;
    if (!measure_tensor(first, end, scales)) return false;
  }
  return true;
}

bool TritSegments::measure_tensor(uint32_t first, uint32_t end, std::span<std::byte> scales) {
  const auto* begin = values(first).data();
  const auto whole = std::span(begin, values(end - 1).data() + values(end - 1).size());
  if (!trits_[first]) {
    return execution_.kernels().absmax(whole.data(), {}, whole.size()) < kNonFiniteBits;
  }
  const std::optional<TernaryRange> range =
      measure_range(trits_[first]->parameters.clip, whole, execution_);
  if (!range) return false;
  for (uint32_t i = first; i < end; ++i) {
    Trits& trits = *trits_[i];
    trits.limit = range->limit;
    std::byte* to = scales.data() + trits.scales_at;
    if (trits.parameters.group_size == 0) {
      store_le_f32(to, range->largest);
    } else {
      measure_group_scales(trits.shape, range->limit, values(i), to, execution_);
    }
  }
  return true;
}

Status TritSegments::share(std::span<const std::byte> scales, uint64_t step) {
  const StandardArithmetic arithmetic;
  std::ranges::copy(scales, scales_.begin());
  for (uint32_t i = 0; i < trits_.size(); ++i) {
    if (!trits_[i] || !owns(i)) continue;
    Trits& trits = *trits_[i];
    trits.sums.clear();
    if (!shards_.is_worker()) continue;
    const uint64_t size = draw(i, step, own_payload_);
    GW_RETURN_IF_ERROR(trits.sums.add(trits.shape, push_codec(i).info().name,
                                      std::span(own_payload_).first(size), execution_));
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
  const StandardArithmetic arithmetic;
  if (!owns(i)) return draw(i, step, payload);
  Trits& trits = *trits_[i];
  const Segment& segment = shards_.segment(i);
  const auto& pulled = *parameters_of<QsgdParameters>(*segment.pull_codec);
  return trits.sums.encode(pulled.shape(segment.n), trits.shape.groups,
                           scales_.data() + trits.scales_at, payload, execution_);
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
  return trits.sums.add(trits.shape, push_codec(i).info().name, payload, execution_);
}

}  // namespace gradwire
