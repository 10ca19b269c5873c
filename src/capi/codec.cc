// Execution and codecs in C.

#include "gradwire/codec.h"

#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"
#include "gradwire/frame.h"

using namespace gradwire;
using namespace gradwire::capi;

extern "C" {

gw_status gw_execution_create(const char* target, int threads, gw_execution** execution) {
  return guarded({{"execution", execution}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(Execution made,
                        Execution::create(target == nullptr ? "auto" : target, threads));
    std::string name(made.target());
    *execution = new gw_execution{std::move(made), std::move(name)};
    return {};
  });
}

void gw_execution_free(gw_execution* execution) { delete execution; }

const char* gw_execution_target(const gw_execution* execution) { return execution->target.c_str(); }

int gw_execution_threads(const gw_execution* execution) { return execution->execution.threads(); }

const char* gw_simd_target(size_t index) {
  const char* name = nullptr;
  (void)guarded({}, [&]() -> Status {
    const std::vector<std::string_view> names = simd_targets();
    if (index < names.size()) name = names[index].data();
    return {};
  });
  return name;
}

gw_status gw_codec_parse(const char* text, gw_codec** codec) {
  return guarded({{"text", text}, {"codec", codec}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(auto parsed, Codec::parse(text));
    std::string canonical = parsed->text();
    *codec = new gw_codec{std::move(parsed), std::move(canonical)};
    return {};
  });
}

void gw_codec_free(gw_codec* codec) { delete codec; }

const char* gw_codec_text(const gw_codec* codec) { return codec->text.c_str(); }

gw_status gw_max_encoded_size(const gw_codec* codec, uint64_t n, uint64_t* size) {
  return guarded({{"codec", codec}, {"size", size}}, [&]() -> Status {
    GW_RETURN_IF_ERROR(check_numel(n));
    *size = max_frame_size(*codec->codec, n);
    return {};
  });
}

}  // extern "C"
