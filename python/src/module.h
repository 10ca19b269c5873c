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

// Types as the stub names them: dict[str, Any] and a list of these.
using Dict = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;
using DictList = nanobind::typed<nanobind::list, Dict>;

// name, default, values, help of each parameter of the lists.
[[nodiscard]] nanobind::list parameter_dicts(
    std::initializer_list<std::span<const CodecParameter>> lists);

}  // namespace gradwire::python
