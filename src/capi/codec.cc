// Execution and codecs in C.

#include "gradwire/codec.h"

#include <list>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"
#include "gradwire/frame.h"

namespace gradwire::capi {
namespace {

// The registry with strings that end with NUL and all parameters of a codec in one list.
class CodecTable {
 public:
  static const CodecTable& get() {
    static const CodecTable kTable;
    return kTable;
  }

  [[nodiscard]] size_t size() const { return infos_.size(); }
  [[nodiscard]] const gw_codec_info* at(size_t i) const {
    return i < infos_.size() ? &infos_[i] : nullptr;
  }
  [[nodiscard]] const gw_codec_info* find(const CodecInfo& info) const {
    for (size_t i = 0; i < size(); ++i) {
      if (codecs()[i] == &info) return &infos_[i];
    }
    return nullptr;
  }

 private:
  CodecTable() {
    for (const CodecInfo* info : codecs()) {
      std::vector<gw_parameter_info>& parameters = parameters_.emplace_back();
      for (const CodecParameter& parameter : info->parameters) add(parameter, parameters);
      for (const CodecParameter& parameter : common_parameters(*info)) add(parameter, parameters);
      infos_.push_back({.name = keep(info->name),
                        .summary = keep(info->summary),
                        .source = keep(info->source),
                        .error_feedback = info->error_feedback ? 1 : 0,
                        .lossless = info->lossless ? 1 : 0,
                        .draws = info->draws ? 1 : 0,
                        .shares_scales = info->shares_scales ? 1 : 0,
                        .carries_non_finite = info->carries_non_finite ? 1 : 0,
                        .parameters = parameters.data(),
                        .parameter_count = parameters.size()});
    }
  }

  void add(const CodecParameter& parameter, std::vector<gw_parameter_info>& list) {
    list.push_back({.name = keep(parameter.name),
                    .default_value = keep(parameter.default_value),
                    .values = keep(parameter.values),
                    .help = keep(parameter.help)});
  }

  const char* keep(std::string_view text) { return strings_.emplace_back(text).c_str(); }

  std::list<std::string> strings_;  // whose addresses stay
  std::list<std::vector<gw_parameter_info>> parameters_;
  std::vector<gw_codec_info> infos_;
};

const CodecTable* table_or_null() noexcept {
  try {
    return &CodecTable::get();
  } catch (const std::bad_alloc&) {
    report_out_of_memory();
    return nullptr;
  }
}

}  // namespace
}  // namespace gradwire::capi

using namespace gradwire;
using namespace gradwire::capi;

extern "C" {

gw_status gw_execution_create(const char* target, int threads, gw_execution** execution) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("execution", execution));
    Result<Execution> made = Execution::create(target == nullptr ? "auto" : target, threads);
    if (!made.ok()) return made.status();
    std::string name(made.value().target());
    *execution = new gw_execution{std::move(made).value(), std::move(name)};
    return {};
  });
}

void gw_execution_free(gw_execution* execution) { delete execution; }

const char* gw_execution_target(const gw_execution* execution) { return execution->target.c_str(); }

int gw_execution_threads(const gw_execution* execution) { return execution->execution.threads(); }

const char* gw_simd_target(size_t index) {
  try {
    const std::vector<std::string_view> names = simd_targets();
    return index < names.size() ? names[index].data() : nullptr;
  } catch (const std::bad_alloc&) {
    report_out_of_memory();
    return nullptr;
  }
}

size_t gw_codec_count() { return codecs().size(); }

const gw_codec_info* gw_codec_info_at(size_t index) {
  const CodecTable* table = table_or_null();
  return table == nullptr ? nullptr : table->at(index);
}

gw_status gw_codec_parse(const char* text, gw_codec** codec) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("text", text));
    GW_RETURN_IF_ERROR(check_given("codec", codec));
    Result<std::shared_ptr<const Codec>> parsed = Codec::parse(text);
    if (!parsed.ok()) return parsed.status();
    std::string canonical = parsed.value()->text();
    *codec = new gw_codec{std::move(parsed).value(), std::move(canonical)};
    return {};
  });
}

void gw_codec_free(gw_codec* codec) { delete codec; }

const char* gw_codec_text(const gw_codec* codec) { return codec->text.c_str(); }

const gw_codec_info* gw_codec_get_info(const gw_codec* codec) {
  const CodecTable* table = table_or_null();
  return table == nullptr ? nullptr : table->find(codec->codec->info());
}

gw_status gw_max_encoded_size(const gw_codec* codec, uint64_t n, uint64_t* size) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("codec", codec));
    GW_RETURN_IF_ERROR(check_given("size", size));
    if (n > kMaxNumel) {
      return {StatusCode::kLimitExceeded,
              std::to_string(n) + " values are more than the limit of 2^40"};
    }
    *size = max_frame_size(*codec->codec, n);
    return {};
  });
}

}  // extern "C"
