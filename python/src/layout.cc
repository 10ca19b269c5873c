// How a bucket is cut into segments.

#include "gradwire/layout.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "exchange.h"
#include "module.h"

namespace gradwire::python {

std::optional<Direction> parse_direction(const std::string& text) {
  if (text == "both") return std::nullopt;
  if (text == "push") return Direction::kPush;
  if (text == "pull") return Direction::kPull;
  raise(StatusCode::kInvalidArgument,
        "'" + text + "' is no direction; valid ones are: push, pull, both");
}

Direction parse_one_direction(const std::string& text, const std::string& what) {
  const std::optional<Direction> direction = parse_direction(text);
  if (direction) return *direction;
  raise(StatusCode::kInvalidArgument, what + " is of a push or of a pull, not of both");
}

namespace {

using Chosen = std::vector<std::tuple<std::string, std::string, std::string>>;
using Tensors = std::vector<std::pair<std::string, std::vector<uint64_t>>>;

void make_layout_in(PyLayout* self, const Tensors& tensors, uint32_t world_size, std::string codec,
                    std::optional<std::string> pull_codec,
                    const std::vector<std::vector<std::string>>& rules,
                    std::vector<std::string> exclude, uint64_t min_numel, std::string raw_codec,
                    uint32_t servers, std::optional<uint32_t> owner, std::optional<Chosen> chosen,
                    bool rows) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, dims] : tensors) infos.push_back({.name = name, .dims = dims});
  LayoutOptions options = {.codec = std::move(codec),
                           .pull_codec = pull_codec.value_or(""),
                           .exclude = std::move(exclude),
                           .min_numel = min_numel,
                           .raw_codec = std::move(raw_codec),
                           .servers = servers,
                           .cut = rows ? Cut::kRows : Cut::kEvenly,
                           .owner = owner};
  for (const std::vector<std::string>& rule : rules) {
    if (rule.size() < 2 || rule.size() > 3) {
      raise(StatusCode::kInvalidArgument,
            "a rule is (name pattern, codec) or (name pattern, codec, direction)");
    }
    options.rules.push_back({.pattern = rule[0],
                             .codec = rule[1],
                             .direction = parse_direction(rule.size() == 3 ? rule[2] : "both")});
  }
  if (chosen) {
    options.chosen.emplace();
    for (auto& [direction, tensor, text] : *chosen) {
      options.chosen->push_back({.direction = parse_one_direction(direction, "a chosen codec"),
                                 .tensor = std::move(tensor),
                                 .codec = std::move(text)});
    }
  }
  new (self) PyLayout{std::make_shared<const Layout>(
      value_or_raise(Layout::create(std::move(infos), world_size, options)))};
}

DictList list_segments(const PyLayout& self) {
  return dicts_of(self.layout->segments(), [&](nb::dict& entry, const Segment& segment) {
    entry["name"] = self.layout->tensors()[segment.tensor].name;
    entry["bucket_offset"] = segment.bucket_offset;
    entry["tensor_offset"] = segment.tensor_offset;
    entry["numel"] = segment.n;
    entry["owner"] = segment.owner;
    entry["push_codec"] = segment.push_codec->text();
    entry["pull_codec"] = segment.pull_codec->text();
    entry["push_goal"] = segment.push_goal;
    entry["pull_goal"] = segment.pull_goal;
    entry["reason"] = segment.raw_reason;
  });
}

}  // namespace

void bind_layout(nb::module_& module) {
  nb::class_<PyLayout>(
      module, "Layout",
      "How a bucket is cut into segments, who owns each, and their codecs.\n\n"
      "tensors: (name, dims) in the order in which they lie in the bucket; no two have one name. "
      "raw_codec: the codec of "
      "raw tensors, 'bf16' or 'fp16' if the values are of these types. owner: if given, the one of "
      "the `servers` that owns everything. chosen: if given, codecs may be goals "
      "('auto:bits=0.5'); (direction, tensor, codec) says what was chosen so far. rows: every "
      "tensor is cut into rows as FSDP2 shards it, and the "
      "bucket holds the padded shards one after the other.")
      .def("__init__", &make_layout_in, nb::arg("tensors"), nb::arg("world_size"), nb::arg("codec"),
           nb::kw_only(), nb::arg("pull_codec") = nb::none(), nb::arg("rules") = nb::tuple(),
           nb::arg("exclude") = nb::tuple(), nb::arg("min_numel") = 256,
           nb::arg("raw_codec") = "raw", nb::arg("servers") = 0, nb::arg("owner") = nb::none(),
           nb::arg("chosen") = nb::none(), nb::arg("rows") = false)
      .def_prop_ro("segments", &list_segments)
      .def_prop_ro(
          "unmatched", [](const PyLayout& self) { return self.layout->unmatched(); },
          "Patterns of rules and exclude that match none of the tensors.")
      .def_prop_ro("numel", [](const PyLayout& self) { return self.layout->numel(); })
      .def_prop_ro("workers", [](const PyLayout& self) { return self.layout->workers(); })
      .def("describe", [](const PyLayout& self) { return self.layout->describe(); });
}

}  // namespace gradwire::python
