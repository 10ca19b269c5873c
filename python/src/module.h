#pragma once

#include <nanobind/nanobind.h>

namespace gradwire::python {

void bind_codecs(nanobind::module_& module);
void bind_exchange(nanobind::module_& module);

}  // namespace gradwire::python
