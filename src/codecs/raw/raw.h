#pragma once

#include "gradwire/codec.h"

namespace gradwire {

struct RawParameters {
  Dtype dtype = Dtype::kFloat32;  // of the values in payloads that are decoded
};

}  // namespace gradwire
