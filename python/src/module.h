#pragma once

#include <span>

#include <nanobind/nanobind.h>

#include "gradwire/codec.h"

namespace gradwire::python {

void bind_codecs(nanobind::module_& module);
void bind_layout(nanobind::module_& module);
void bind_exchange(nanobind::module_& module);
void bind_server_sides(nanobind::module_& module);

// name, default, values, help of each.
[[nodiscard]] nanobind::list parameter_dicts(std::span<const CodecParameter> parameters);

}  // namespace gradwire::python
