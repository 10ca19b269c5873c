#pragma once

#include <string>

#include <nanobind/nanobind.h>

#include "gradwire/codec.h"

namespace gradwire::python {

void bind_codecs(nanobind::module_& module);
void bind_exchange(nanobind::module_& module);

// Text of a codec as read from the wire.
[[nodiscard]] std::string wire_text(const Codec& codec);

}  // namespace gradwire::python
