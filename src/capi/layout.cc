// Layouts in C.

#include "gradwire/layout.h"

#include <utility>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"

using namespace gradwire;
using namespace gradwire::capi;

namespace {

constexpr gw_layout_options kDefaults = {.codec = "3lc",
                                         .pull_codec = nullptr,
                                         .rules = nullptr,
                                         .rule_count = 0,
                                         .exclude = nullptr,
                                         .exclude_count = 0,
                                         .min_numel = 256};

Result<std::vector<TensorInfo>> read_tensors(const gw_tensor* tensors, size_t count) {
  GW_RETURN_IF_ERROR(check_values("tensors", tensors, count));
  std::vector<TensorInfo> infos;
  for (const gw_tensor& tensor : std::span(tensors, count)) {
    GW_RETURN_IF_ERROR(check_given("a tensor's name", tensor.name));
    GW_RETURN_IF_ERROR(check_values("a tensor's dims", tensor.dims, tensor.dim_count));
    infos.push_back({.name = tensor.name, .dims = {tensor.dims, tensor.dims + tensor.dim_count}});
  }
  return infos;
}

Result<LayoutRule> read_rule(const gw_rule& rule) {
  GW_RETURN_IF_ERROR(check_given("a rule's pattern", rule.pattern));
  GW_RETURN_IF_ERROR(check_given("a rule's codec", rule.codec));
  LayoutRule read{.pattern = rule.pattern, .codec = rule.codec};
  if (rule.role < GW_PUSH_AND_PULL || rule.role > GW_PULL) {
    return Status(StatusCode::kInvalidArgument,
                  "role " + std::to_string(rule.role) +
                      "; valid ones are 0 (GW_PUSH_AND_PULL), 1 (GW_PUSH) and 2 (GW_PULL)");
  }
  if (rule.role != GW_PUSH_AND_PULL) {
    read.direction = rule.role == GW_PUSH ? Direction::kPush : Direction::kPull;
  }
  return read;
}

Result<LayoutOptions> read_options(const gw_layout_options& options) {
  GW_RETURN_IF_ERROR(check_given("the options' codec", options.codec));
  GW_RETURN_IF_ERROR(check_values("rules", options.rules, options.rule_count));
  GW_RETURN_IF_ERROR(check_values("exclude", options.exclude, options.exclude_count));
  LayoutOptions read{.codec = options.codec,
                     .pull_codec = options.pull_codec == nullptr ? "" : options.pull_codec,
                     .min_numel = options.min_numel};
  for (const gw_rule& rule : std::span(options.rules, options.rule_count)) {
    Result<LayoutRule> one = read_rule(rule);
    if (!one.ok()) return one.status();
    read.rules.push_back(std::move(one).value());
  }
  for (const char* pattern : std::span(options.exclude, options.exclude_count)) {
    GW_RETURN_IF_ERROR(check_given("a pattern of exclude", pattern));
    read.exclude.emplace_back(pattern);
  }
  return read;
}

}  // namespace

extern "C" {

void gw_layout_options_init(gw_layout_options* options) { *options = kDefaults; }

gw_status gw_layout_create(const gw_tensor* tensors, size_t tensor_count, uint32_t world_size,
                           const gw_layout_options* options, gw_layout** layout) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("layout", layout));
    Result<std::vector<TensorInfo>> infos = read_tensors(tensors, tensor_count);
    if (!infos.ok()) return infos.status();
    const Result<LayoutOptions> read = read_options(options == nullptr ? kDefaults : *options);
    if (!read.ok()) return read.status();
    Result<Layout> made = Layout::create(std::move(infos).value(), world_size, read.value());
    if (!made.ok()) return made.status();
    auto handle = std::make_unique<gw_layout>();
    handle->layout = std::make_shared<const Layout>(std::move(made).value());
    for (const Segment& segment : handle->layout->segments()) {
      handle->texts.push_back({segment.push_codec->text(), segment.pull_codec->text()});
    }
    *layout = handle.release();
    return {};
  });
}

void gw_layout_free(gw_layout* layout) { delete layout; }

uint64_t gw_layout_numel(const gw_layout* layout) { return layout->layout->numel(); }

const char* gw_layout_unmatched(const gw_layout* layout, size_t index) {
  const std::vector<std::string>& unmatched = layout->layout->unmatched();
  return index < unmatched.size() ? unmatched[index].c_str() : nullptr;
}

size_t gw_layout_segment_count(const gw_layout* layout) {
  return layout->layout->segments().size();
}

gw_status gw_layout_segment(const gw_layout* layout, size_t index, gw_segment* segment) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("layout", layout));
    GW_RETURN_IF_ERROR(check_given("segment", segment));
    GW_RETURN_IF_ERROR(check_index(index, layout->layout->segments().size()));
    const Segment& found = layout->layout->segments()[index];
    *segment = {.tensor = layout->layout->tensors()[found.tensor].name.c_str(),
                .tensor_offset = found.tensor_offset,
                .bucket_offset = found.bucket_offset,
                .n = found.n,
                .owner = found.owner,
                .push_codec = layout->texts[index].push.c_str(),
                .pull_codec = layout->texts[index].pull.c_str(),
                .raw_reason = found.raw_reason.c_str()};
    return {};
  });
}

}  // extern "C"
