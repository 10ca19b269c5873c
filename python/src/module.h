#pragma once

#include <initializer_list>
#include <span>

#include <nanobind/nanobind.h>

#include "exchange/shards/shard_codec.h"
#include "gradwire/codec.h"

namespace gradwire::python {

void bind_codecs(nanobind::module_& module);
void bind_choice(nanobind::module_& module);
void bind_deltas(nanobind::module_& module);
void bind_layout(nanobind::module_& module);
void bind_exchange(nanobind::module_& module);
void bind_server_sides(nanobind::module_& module);
void bind_simulation(nanobind::module_& module);

// Makes the shard codecs of an exchange. gradwire._cuda makes objects of this class; gradwire._core
// binds it and takes them, because both modules share one nanobind.
struct ShardCodecs {
  ShardCodecFactory make;
};

// dict[str, Any] and a list of these, as the stub names them.
using Dict = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;
using DictList = nanobind::typed<nanobind::list, Dict>;

// A dict for each element, which fill(entry, element) fills.
template <typename Elements, typename Fill>
[[nodiscard]] DictList dicts_of(const Elements& elements, const Fill& fill) {
  nanobind::list list;
  for (const auto& element : elements) {
    nanobind::dict entry;
    fill(entry, element);
    list.append(entry);
  }
  return list;
}

// A dict with name, default, values and help for each parameter of the lists.
[[nodiscard]] nanobind::list parameter_dicts(
    std::initializer_list<std::span<const CodecParameter>> lists);

}  // namespace gradwire::python
