#include "codecs/registry.h"

#include <array>

namespace gradwire {
namespace {

constexpr const CodecEntry* kEntries[] = {
#define GW_CODEC(symbol) &codec_entries::symbol,
#include "codecs/codecs.def"
#undef GW_CODEC
};

constexpr size_t kCodecCount = std::size(kEntries);

constexpr CodecParameter feedback(std::string_view default_value) {
  return {"ef", default_value, "on|off",
          "error feedback: keep what was not sent and add it the next time"};
}

constexpr CodecParameter kResidual = {
    "residual", "f32", "f32|bf16", "type in which error feedback keeps it; bf16 halves the memory"};

constexpr CodecParameter kWithFeedback[] = {feedback("on"), kResidual};
constexpr CodecParameter kWithoutFeedback[] = {feedback("off"), kResidual};

std::string valid_names() {
  std::string names;
  for (const CodecEntry* entry : kEntries) {
    if (!names.empty()) names += ", ";
    names += entry->info->name;
  }
  return names;
}

Result<ResidualType> parse_residual_type(const CodecInfo& info, const Parameters& parameters) {
  Result<size_t> ef = parameters.choice("ef", {"off", "on"}, info.error_feedback ? 1 : 0);
  if (!ef.ok()) return ef.status();
  Result<size_t> type = parameters.choice("residual", {"f32", "bf16"}, 0);
  if (!type.ok()) return type.status();
  if (ef.value() == 0) {
    if (parameters.has("residual")) {
      return Status(StatusCode::kBadParameter,
                    "residual= says how error feedback keeps its residual, but error feedback is "
                    "off for '" +
                        std::string(info.name) + "'; add ef=on or leave residual out");
    }
    return ResidualType::kNone;
  }
  return type.value() == 0 ? ResidualType::kFloat32 : ResidualType::kBfloat16;
}

}  // namespace

Result<std::shared_ptr<const Codec>> Codec::parse(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  for (const CodecEntry* entry : kEntries) {
    if (entry->info->name != name) continue;
    Result<Parameters> parameters = Parameters::parse(*entry->info, text.substr(name.size()));
    if (!parameters.ok()) return parameters.status();
    Result<ResidualType> residual_type = parse_residual_type(*entry->info, parameters.value());
    if (!residual_type.ok()) return residual_type.status();
    return entry->create(parameters.value(), residual_type.value());
  }
  return Status(StatusCode::kUnknownCodec,
                "unknown codec '" + std::string(name) + "'; valid names are: " + valid_names());
}

Result<std::shared_ptr<const Codec>> Codec::from_wire(const WireCodec& wire, Dtype dtype) {
  for (const CodecEntry* entry : kEntries) {
    if (entry->info->id == wire.id) return entry->from_wire(wire, dtype);
  }
  return Status(StatusCode::kUnknownCodec, "unknown codec id " + std::to_string(wire.id) +
                                               "; this build decodes: " + valid_names());
}

std::string Codec::wire_text() const {
  const std::string keys = parameter_text();
  return std::string(info().name) + (keys.empty() ? "" : ":" + keys);
}

std::string Codec::text() const {
  std::string keys = parameter_text();
  const bool feedback = residual_type_ != ResidualType::kNone;
  if (feedback != info().error_feedback) append_parameter(keys, "ef", feedback ? "on" : "off");
  if (residual_type_ == ResidualType::kBfloat16) append_parameter(keys, "residual", "bf16");
  std::string text(info().name);
  if (!keys.empty()) text += ':' + keys;
  return text;
}

std::span<const CodecInfo* const> codecs() noexcept {
  static const auto kInfos = [] {
    std::array<const CodecInfo*, kCodecCount> infos{};
    for (size_t i = 0; i < kCodecCount; ++i) infos[i] = kEntries[i]->info;
    return infos;
  }();
  return kInfos;
}

std::span<const CodecParameter> common_parameters(const CodecInfo& info) noexcept {
  if (info.lossless) return {};
  if (info.error_feedback) return kWithFeedback;
  return kWithoutFeedback;
}

}  // namespace gradwire
