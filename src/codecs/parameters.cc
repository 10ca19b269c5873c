#include "codecs/parameters.h"

#include <charconv>

namespace gradwire {
namespace {

std::string valid_keys(const CodecInfo& info) {
  std::string keys;
  for (std::span<const CodecParameter> list : {info.parameters, common_parameters(info)}) {
    for (const CodecParameter& parameter : list) {
      if (!keys.empty()) keys += ", ";
      keys += std::string(parameter.name) + "=" + std::string(parameter.values);
    }
  }
  return keys.empty() ? "none" : keys;
}

bool is_valid_key(const CodecInfo& info, std::string_view key) {
  for (std::span<const CodecParameter> list : {info.parameters, common_parameters(info)}) {
    for (const CodecParameter& parameter : list) {
      if (parameter.name == key) return true;
    }
  }
  return false;
}

template <typename T>
bool parse_whole(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

}  // namespace

Result<Parameters> Parameters::parse(const CodecInfo& info, std::string_view text) {
  Parameters parameters;
  parameters.codec_ = info.name;
  while (!text.empty()) {
    text.remove_prefix(1);  // the colon, or the comma behind the item before
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(item.size());
    const size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    if (equals == std::string_view::npos && is_valid_key(info, key)) {
      return Status(StatusCode::kBadParameter, "codec '" + parameters.codec_ + "': parameter '" +
                                                   std::string(key) +
                                                   "' has no value; valid: " + valid_keys(info));
    }
    if (equals == std::string_view::npos || !is_valid_key(info, key)) {
      return Status(StatusCode::kBadParameter, "codec '" + parameters.codec_ +
                                                   "' has no parameter '" + std::string(key) +
                                                   "'; valid: " + valid_keys(info));
    }
    if (parameters.has(key)) {
      return Status(StatusCode::kBadParameter, "codec '" + parameters.codec_ + "': parameter '" +
                                                   std::string(key) + "' is given twice");
    }
    parameters.values_.emplace_back(key, item.substr(equals + 1));
  }
  return parameters;
}

bool Parameters::has(std::string_view key) const noexcept { return find(key) != nullptr; }

const std::string* Parameters::find(std::string_view key) const noexcept {
  for (const auto& [name, value] : values_) {
    if (name == key) return &value;
  }
  return nullptr;
}

Status Parameters::bad_value(std::string_view key, const std::string& value,
                             const std::string& valid) const {
  return Status(StatusCode::kBadParameter, "codec '" + codec_ + "': " + std::string(key) + "=" +
                                               value + " is not valid; give " + valid);
}

Result<size_t> Parameters::choice(std::string_view key,
                                  std::initializer_list<std::string_view> choices,
                                  size_t otherwise) const {
  const std::string* text = find(key);
  if (text == nullptr) return otherwise;
  std::string valid;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (choices.begin()[i] == *text) return i;
    valid += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ");
    valid += choices.begin()[i];
  }
  return bad_value(key, *text, valid);
}

Result<float> Parameters::number(std::string_view key, float low, float high,
                                 float otherwise) const {
  const std::string* text = find(key);
  if (text == nullptr) return otherwise;
  float value = 0;
  if (!parse_whole(*text, value) || !(value >= low && value < high)) {
    return bad_value(key, *text,
                     "a number in [" + format_number(low) + ", " + format_number(high) + ")");
  }
  return value;
}

Result<uint32_t> Parameters::count(std::string_view key, uint32_t multiple, uint32_t high,
                                   uint32_t otherwise) const {
  const std::string* text = find(key);
  if (text == nullptr) return otherwise;
  uint32_t value = 0;
  if (!parse_whole(*text, value) || value == 0 || value % multiple != 0 || value > high) {
    const std::string what =
        multiple == 1 ? "a whole number" : "a multiple of " + std::to_string(multiple);
    return bad_value(key, *text,
                     what + " from " + std::to_string(multiple) + " to " + std::to_string(high));
  }
  return value;
}

Result<uint32_t> Parameters::bucket(uint32_t multiple, uint32_t otherwise) const {
  return count("bucket", multiple, UINT32_MAX / multiple * multiple, otherwise);
}

void append_parameter(std::string& text, std::string_view key, std::string_view value) {
  if (!text.empty()) text += ',';
  text += key;
  text += '=';
  text += value;
}

void append_bucket(std::string& text, uint32_t bucket, uint32_t otherwise) {
  if (bucket != otherwise) append_parameter(text, "bucket", std::to_string(bucket));
}

std::string format_number(float value) {
  char text[32];
  // As people write them: 0.0001, where the shortest would be 1e-04.
  const auto format =
      value >= 1e-6f && value < 1e6f ? std::chars_format::fixed : std::chars_format::general;
  const auto [end, error] = std::to_chars(text, text + sizeof text, value, format);
  return std::string(text, end);
}

}  // namespace gradwire
