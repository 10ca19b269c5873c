// The lists of codecs and exchanges in C. The texts of their descriptions are string literals, so
// they end with NUL.

#include <algorithm>
#include <initializer_list>
#include <list>
#include <span>
#include <vector>

#include "capi/errors.h"
#include "capi/handles.h"
#include "gradwire/exchange_choice.h"

using namespace gradwire;

namespace {

// A list of gw_codec_info or gw_exchange_info.
template <typename CInfo>
struct Registry {
  // `info` has everything but the parameters.
  void add(CInfo info, std::initializer_list<std::span<const CodecParameter>> lists) {
    std::vector<gw_parameter_info>& list = parameters.emplace_back();
    for (std::span<const CodecParameter> given : lists) {
      for (const CodecParameter& parameter : given) {
        list.push_back({.name = parameter.name.data(),
                        .default_value = parameter.default_value.data(),
                        .values = parameter.values.data(),
                        .help = parameter.help.data()});
      }
    }
    info.parameters = list.data();
    info.parameter_count = list.size();
    infos.push_back(info);
  }

  std::vector<CInfo> infos;
  std::list<std::vector<gw_parameter_info>> parameters;  // a list keeps their addresses
};

Registry<gw_codec_info> list_codecs() {
  Registry<gw_codec_info> list;
  for (const CodecInfo* info : codecs()) {
    list.add({.name = info->name.data(),
              .summary = info->summary.data(),
              .source = info->source.data(),
              .error_feedback = info->error_feedback,
              .lossless = info->lossless,
              .draws = info->draws,
              .shares_scales = info->shares_scales,
              .carries_non_finite = info->carries_non_finite,
              .parameters = nullptr,
              .parameter_count = 0},
             {info->parameters, common_parameters(*info)});
  }
  return list;
}

Registry<gw_exchange_info> list_exchanges() {
  Registry<gw_exchange_info> list;
  for (const ExchangeInfo* info : exchanges()) {
    if (info->has_servers) continue;  // no layout that is made in C has servers
    list.add({.name = info->name.data(),
              .summary = info->summary.data(),
              .source = info->source.data(),
              .default_codec = info->default_codec.data(),
              .sums = info->sums,
              .updates = info->updates,
              .parameters = nullptr,
              .parameter_count = 0},
             {info->parameters});
  }
  return list;
}

// An element of the list, which is made at the first call; NULL after the last.
template <typename CInfo>
const CInfo* info_at(Registry<CInfo> (*make)(), size_t index) noexcept {
  const CInfo* info = nullptr;
  (void)capi::guarded({}, [&]() -> Status {
    static const Registry<CInfo> kList = make();
    if (index < kList.infos.size()) info = &kList.infos[index];
    return {};
  });
  return info;
}

}  // namespace

extern "C" {

size_t gw_codec_count() { return codecs().size(); }

const gw_codec_info* gw_codec_info_at(size_t index) { return info_at(list_codecs, index); }

const gw_codec_info* gw_codec_get_info(const gw_codec* codec) {
  const auto found = std::ranges::find(codecs(), &codec->codec->info());
  return gw_codec_info_at(static_cast<size_t>(found - codecs().begin()));
}

size_t gw_exchange_count() {
  return static_cast<size_t>(std::ranges::count(exchanges(), false, &ExchangeInfo::has_servers));
}

const gw_exchange_info* gw_exchange_info_at(size_t index) { return info_at(list_exchanges, index); }

}  // extern "C"
