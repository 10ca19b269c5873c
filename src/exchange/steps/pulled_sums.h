#pragma once

#include <string>

#include "gradwire/layout.h"
#include "gradwire/status.h"

namespace gradwire {

// kInvalidArgument, with the name of the exchange and of the tensor: a codec of the segment keeps a
// residual.
Status check_keeps_no_residual(const std::string& exchange, const Layout& layout,
                               const Segment& segment);

// Whether pushes of the segment are trits whose scales can be shared.
[[nodiscard]] bool pushes_trits(const Segment& segment);

// The layout in which the sums of the workers' trits are pulled exactly: as levels of qsgd, from -N
// to N for N workers (TernGrad, section 3.1). Segments whose pushes are no trits stay as they are.
// kInvalidArgument: the pull codec of trits cannot carry their sums, or keeps a residual; too many
// workers.
Result<Layout> with_pulled_sums(const std::string& exchange, const Layout& layout);

}  // namespace gradwire
