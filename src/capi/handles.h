#pragma once

// The contents of the opaque handles of gradwire.h.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/return_if_error.h"
#include "gradwire/compressor.h"
#include "gradwire/exchange.h"
#include "gradwire/execution.h"
#include "gradwire/gradwire.h"
#include "gradwire/layout.h"

struct gw_execution {
  gradwire::Execution execution;
  std::string target;
};

struct gw_codec {
  std::shared_ptr<const gradwire::Codec> codec;
  std::string text;
};

struct gw_compressor {
  gradwire::Compressor compressor;
};

struct gw_layout {
  // The codecs of a segment, as text.
  struct Texts {
    std::string push;
    std::string pull;
  };

  std::shared_ptr<const gradwire::Layout> layout;
  std::vector<Texts> texts = {};  // one for each segment
};

struct gw_exchange {
  std::unique_ptr<gradwire::Exchange> exchange;
  std::string description;
  std::vector<gradwire::OutgoingMessage> outgoing = {};  // the first `handed_out` were handed out
  size_t handed_out = 0;
  bool retractable = false;
};

struct gw_residuals {
  std::vector<gradwire::ResidualPiece> pieces;
};

namespace gradwire::capi {

// call(execution) with the given execution, or with a new one for this call if it is NULL.
template <typename Call>
auto with_execution(gw_execution* given, const Call& call)
    -> decltype(call(std::declval<Execution&>())) {
  if (given != nullptr) return call(given->execution);
  GW_ASSIGN_OR_RETURN(Execution own, Execution::create());
  return call(own);
}

// kLimitExceeded if no frame can hold n values.
Status check_numel(uint64_t n);

// A view of the n values of type dtype at x. kInvalidArgument (NULL, or not aligned),
// kUnsupportedDtype, kLimitExceeded.
Result<InputView> view_input(const void* x, uint64_t n, gw_dtype dtype);

std::span<const std::byte> bytes_at(const void* memory, uint64_t size);

// Sets *size and returns the frame's status: kNonFinite if the frame is a marker, which has a size
// too.
Status finish_encoding(const Result<EncodedFrame>& encoded, uint64_t* size);

}  // namespace gradwire::capi
