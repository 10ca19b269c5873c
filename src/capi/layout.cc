// Layouts in C.

#include "gradwire/layout.h"

#include <utility>

#include "base/return_if_error.h"
#include "capi/arguments.h"
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

}  // namespace

extern "C" {

void gw_layout_options_init(gw_layout_options* options) { *options = kDefaults; }

gw_status gw_layout_create(const gw_tensor* tensors, size_t tensor_count, uint32_t world_size,
                           const gw_layout_options* options, gw_layout** layout) {
  return guarded({{"layout", layout}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(auto infos, read_tensors(tensors, tensor_count));
    GW_ASSIGN_OR_RETURN(const auto read,
                        read_layout_options(options == nullptr ? kDefaults : *options));
    GW_ASSIGN_OR_RETURN(Layout made, Layout::create(std::move(infos), world_size, read));
    auto handle =
        std::make_unique<gw_layout>(gw_layout{std::make_shared<const Layout>(std::move(made))});
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
  return guarded({{"layout", layout}, {"segment", segment}}, [&]() -> Status {
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
