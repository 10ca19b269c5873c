#include "codecs/registry.h"

#include <array>

#include "base/standard_arithmetic.h"
#include "base/suggestion.h"

namespace gradwire {
namespace {

constexpr const CodecEntry* kEntries[] = {
#define GW_CODEC(symbol) &codec_entries::symbol,
#include "codecs/codecs.def"
#undef GW_CODEC
};

constexpr CodecName kNames[] = {
#define GW_CODEC_NAME(name, codec, summary) {name, codec, summary},
#include "codecs/codec_names.def"
#undef GW_CODEC_NAME
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
constexpr CodecParameter kNeverFeedback[] = {
    {"ef", "off", "off", "error feedback is refused: what it keeps would grow without bound"}};

std::string valid_names() {
  std::string names;
  for (const CodecEntry* entry : kEntries) {
    if (!names.empty()) names += ", ";
    names += entry->info->name;
  }
  for (const CodecName& known : kNames) names += ", " + std::string(known.name);
  return names;
}

constexpr std::string_view kOffOn[] = {"off", "on"};
constexpr std::string_view kResidualTypes[] = {"f32", "bf16"};

ResidualType parse_residual_type(bool feedback, Parameters& given) {
  const size_t type = given.choice("residual", kResidualTypes, size_t{0});
  if (given.choice("ef", kOffOn, feedback)) {
    return type == 0 ? ResidualType::kFloat32 : ResidualType::kBfloat16;
  }
  if (given.has("residual")) {
    given.fail(
        "residual= says how error feedback keeps its residual, but error feedback is off; "
        "add ef=on or leave residual out");
  }
  return ResidualType::kNone;
}

Result<std::shared_ptr<const Codec>> parse_spelled_out(const std::string& text,
                                                       FeedbackDefault feedback) {
  const std::string name = text.substr(0, text.find(':'));
  for (const CodecEntry* entry : kEntries) {
    if (entry->info->name != name) continue;
    GW_ASSIGN_OR_RETURN(
        Parameters given,
        Parameters::parse(*entry->info, std::string_view(text).substr(name.size())));
    const ResidualType residual_type = parse_residual_type(
        feedback == FeedbackDefault::kOfCodec && entry->info->error_feedback, given);
    return entry->create(given, residual_type);
  }
  if (name == "auto") {
    return Status(StatusCode::kUnknownCodec,
                  "'" + text +
                      "' is no codec: it chooses codecs while a training runs. It can stand in "
                      "GradwireState, LocalSteps, ShardedOptimizer and FullyShardComm of "
                      "gradwire.torch, with exchange=sharded, and in gradwire train. Valid names "
                      "here are: " +
                      valid_names());
  }
  return Status(StatusCode::kUnknownCodec,
                "unknown codec '" + name + "'; valid names are: " + valid_names());
}

Result<std::shared_ptr<const Codec>> parse_as_written(std::string_view written,
                                                      FeedbackDefault feedback) {
  const std::string text = spell_out_codec(written);
  Result<std::shared_ptr<const Codec>> parsed = parse_spelled_out(text, feedback);
  if (parsed.ok() || text == written) return parsed;
  return Status(parsed.status().code(), parsed.status().message() + ". '" + std::string(written) +
                                            "' stands for '" + text + "'");
}

}  // namespace

Result<std::shared_ptr<const Codec>> Codec::parse(std::string_view text, FeedbackDefault feedback) {
  const StandardArithmetic arithmetic;
  Result<std::shared_ptr<const Codec>> parsed = parse_as_written(text, feedback);
  if (parsed.ok()) return parsed;
  const std::string meant = with_usual_punctuation(text);
  if (meant == text) return parsed;
  const StatusCode before = parsed.status().code();
  const StatusCode then = parse_as_written(meant, feedback).status().code();
  // A text that chooses codecs at run time is no codec here.
  const bool names_one = then != StatusCode::kUnknownCodec || meant.starts_with("auto:");
  if (then != StatusCode::kOk && !(before == StatusCode::kUnknownCodec && names_one)) return parsed;
  return Status(parsed.status().code(),
                parsed.status().message() + ". Did you mean '" + meant + "'?");
}

Result<std::shared_ptr<const Codec>> Codec::from_wire(const WireCodec& wire, Dtype dtype) {
  const StandardArithmetic arithmetic;
  for (const CodecEntry* entry : kEntries) {
    if (entry->info->id == wire.id) return entry->from_wire(wire, dtype);
  }
  return Status(StatusCode::kUnknownCodec, "unknown codec id " + std::to_string(wire.id) +
                                               "; this build decodes: " + valid_names());
}

std::span<const CodecInfo* const> codecs() noexcept {
  static const auto kInfos = [] {
    std::array<const CodecInfo*, kCodecCount> infos{};
    for (size_t i = 0; i < kCodecCount; ++i) infos[i] = kEntries[i]->info;
    return infos;
  }();
  return kInfos;
}

std::span<const CodecName> codec_names() noexcept { return kNames; }

std::string spell_out_codec(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  for (const CodecName& known : kNames) {
    if (known.name != name) continue;
    std::string spelled(known.codec);
    if (name.size() < text.size()) spelled += "," + std::string(text.substr(name.size() + 1));
    return spelled;
  }
  return std::string(text);
}

std::span<const CodecParameter> common_parameters(const CodecInfo& info) noexcept {
  if (info.lossless) return {};
  if (!info.takes_feedback) return kNeverFeedback;
  if (info.error_feedback) return kWithFeedback;
  return kWithoutFeedback;
}

}  // namespace gradwire
