#include "codecs/parameters.h"

#include "base/parse.h"
#include "base/return_if_error.h"

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

}  // namespace

Result<Parameters> Parameters::parse(const CodecInfo& info, std::string_view text) {
  Parameters parameters;
  parameters.codec_ = info.name;
  while (!text.empty()) {
    text.remove_prefix(1);  // the colon or the comma
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(item.size());
    const size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const std::string name(key);
    if (!is_valid_key(info, key)) {
      return Status(StatusCode::kBadParameter, "codec '" + parameters.codec_ +
                                                   "' has no parameter '" + name +
                                                   "'; valid: " + valid_keys(info));
    }
    if (equals == std::string_view::npos) {
      parameters.fail("parameter '" + name + "' has no value; valid: " + valid_keys(info));
    } else if (parameters.has(key)) {
      parameters.fail("parameter '" + name + "' is given twice");
    }
    GW_RETURN_IF_ERROR(parameters.status());
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

void Parameters::fail(const std::string& what) {
  if (status_.ok()) status_ = Status(StatusCode::kBadParameter, "codec '" + codec_ + "': " + what);
}

void Parameters::refuse(std::string_view key, const std::string& value, const std::string& valid) {
  fail(std::string(key) + "=" + value + " is not valid; give " + valid);
}

size_t Parameters::place(std::string_view key, std::span<const std::string_view> names,
                         size_t otherwise) {
  const std::string* text = find(key);
  if (text == nullptr) return otherwise;
  std::string valid;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == *text) return i;
    valid += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ");
    valid += names[i];
  }
  refuse(key, *text, valid);
  return otherwise;
}

float Parameters::number(std::string_view key, float low, float high, float otherwise,
                         std::string_view valid) {
  const std::string* text = find(key);
  if (text == nullptr) return otherwise;
  float value = 0;
  if (parse_whole(*text, value) && value >= low && value < high) return value;
  const std::string bounds = "in [" + format_number(low) + ", " + format_number(high) + ")";
  refuse(key, *text, "a number " + (valid.empty() ? bounds : std::string(valid)));
  return otherwise;
}

uint32_t Parameters::count(std::string_view key, uint32_t multiple, uint32_t high,
                           uint32_t otherwise) {
  const std::string* text = find(key);
  if (text == nullptr) return otherwise;
  uint32_t value = 0;
  if (parse_whole(*text, value) && value != 0 && value % multiple == 0 && value <= high) {
    return value;
  }
  const std::string what =
      multiple == 1 ? "a whole number" : "a multiple of " + std::to_string(multiple);
  refuse(key, *text, what + " from " + std::to_string(multiple) + " to " + std::to_string(high));
  return otherwise;
}

uint32_t Parameters::group_size(uint32_t multiple, uint32_t otherwise) {
  return count("bucket", multiple, UINT32_MAX / multiple * multiple, otherwise);
}

void append_parameter(std::string& text, std::string_view key, std::string_view value) {
  if (!text.empty()) text += ',';
  text += key;
  text += '=';
  text += value;
}

void append_group_size(std::string& text, uint32_t size, uint32_t otherwise) {
  if (size != otherwise) append_parameter(text, "bucket", std::to_string(size));
}

std::string format_number(float value) {
  char text[32];
  // As people write numbers: 0.0001, where the shortest form would be 1e-04.
  const auto format =
      value >= 1e-6f && value < 1e6f ? std::chars_format::fixed : std::chars_format::general;
  const auto [end, error] = std::to_chars(text, text + sizeof text, value, format);
  return std::string(text, end);
}

}  // namespace gradwire
