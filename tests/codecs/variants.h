#pragma once

// The text of every codec with each value of each of its keys, from the registry.

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/codec.h"

namespace gradwire {

// The smallest group of a codec whose groups are described as in "multiple of 8" or "1 to 99".
inline uint64_t smallest_group(std::string_view values) {
  constexpr std::string_view kMultiple = "multiple of ";
  if (values.starts_with(kMultiple)) values.remove_prefix(kMultiple.size());
  return std::stoull(std::string(values));
}

// "name", and "name:key=value" for every listed value, for the smallest groups and for groups that
// are larger than a chunk.
inline std::vector<std::string> codec_variants() {
  std::vector<std::string> all;
  for (const CodecInfo* info : codecs()) {
    all.emplace_back(info->name);
    for (auto list : {info->parameters, common_parameters(*info)}) {
      for (const CodecParameter& parameter : list) {
        if (parameter.name == "bucket") {
          const uint64_t smallest = smallest_group(parameter.values);
          for (uint64_t group : {smallest, (kChunkValues / smallest + 1) * smallest}) {
            all.push_back(std::string(info->name) + ":bucket=" + std::to_string(group));
          }
        }
        std::string_view rest = parameter.values;
        while (parameter.values.find('|') != std::string_view::npos && !rest.empty()) {
          const std::string_view value = rest.substr(0, rest.find('|'));
          rest.remove_prefix(std::min(rest.size(), value.size() + 1));
          std::string text(info->name);
          text += ':' + std::string(parameter.name) + '=' + std::string(value);
          if (parameter.name == "residual") text += ",ef=on";
          if (info->name == "terngrad" && parameter.name == "coder") text += ",pack=trits5";
          all.push_back(text);
        }
      }
    }
  }
  for (const char* text :
       {"3lc:s=1.99,coder=rice", "terngrad:clip=0", "terngrad:clip=0.5",
        "topk:ratio=0.9,index=rice", "topk2bit:density=0.9", "stc:density=0.9", "qsgd:bits=2",
        "qsgd:levels=127,coder=elias", "qsgd:levels=127,coder=elias-dense",
        "qsgd:levels=127,norm=l2,bucket=50000", "qsgd:levels=1000,norm=l2",
        "qsgd:bits=14,coder=elias-dense", "inceptionn:bound=6,ef=on", "truncate:bits=22",
        "truncate:bits=24,ef=on"}) {
    all.emplace_back(text);
  }
  return all;
}

}  // namespace gradwire
