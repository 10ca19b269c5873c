#pragma once

#include <initializer_list>
#include <span>

#include <nanobind/nanobind.h>

#include "gradwire/codec.h"

namespace gradwire::python {

void bind_codecs(nanobind::module_& module);
void bind_layout(nanobind::module_& module);
void bind_exchange(nanobind::module_& module);
void bind_server_sides(nanobind::module_& module);

// dict[str, Any] and a list of these, as the stub names them.
using Dict = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;
using DictList = nanobind::typed<nanobind::list, Dict>;

// A dict with name, default, values and help for each parameter of the lists.
[[nodiscard]] nanobind::list parameter_dicts(
    std::initializer_list<std::span<const CodecParameter>> lists);

}  // namespace gradwire::python
