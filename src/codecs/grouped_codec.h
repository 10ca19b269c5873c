#pragma once

#include <string>

#include "codecs/checks.h"
#include "codecs/chunked_codec.h"
#include "codecs/registry.h"

namespace gradwire {

// A codec C whose only parameter is the size of its groups, a multiple of kMultiple; it stands in
// param_b, where 0 means the whole segment. P has the member `group_size` alone.
template <typename C, typename P, uint32_t kMultiple>
class GroupedCodec : public CodecOf<C, P, ChunkedCodec> {
 public:
  using CodecOf<C, P, ChunkedCodec>::CodecOf;

  static P parse(Parameters& given) { return {.group_size = given.group_size(kMultiple, 0)}; }

  static Result<P> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(check_wire_bits(C::kInfo, wire.param_a, 0));
    GW_RETURN_IF_ERROR(check_wire_group_size(C::kInfo, wire, kMultiple));
    return P{.group_size = wire.param_b};
  }

  WireCodec wire() const noexcept override {
    return {.id = C::kInfo.id, .param_b = this->parameters().group_size};
  }

 protected:
  [[nodiscard]] Groups groups(uint64_t n) const { return {n, this->parameters().group_size}; }

  std::string parameter_text() const override {
    std::string text;
    append_group_size(text, this->parameters().group_size, 0);
    return text;
  }
};

}  // namespace gradwire
