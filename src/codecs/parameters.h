#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/status.h"

namespace gradwire {

// The key=value list behind a codec's name. Every failure is kBadParameter and lists what is valid.
class Parameters {
 public:
  // Accepts the keys of `info` and the common ones, each at most once. `text` is the codec's text
  // from its colon on, or empty.
  static Result<Parameters> parse(const CodecInfo& info, std::string_view text);

  [[nodiscard]] bool has(std::string_view key) const noexcept;

  // Index of the value among `choices`, or `otherwise` where the key is absent.
  Result<size_t> choice(std::string_view key, std::initializer_list<std::string_view> choices,
                        size_t otherwise) const;

  // A float32 in [low, high).
  Result<float> number(std::string_view key, float low, float high, float otherwise) const;

  // A multiple of `multiple` in [multiple, high].
  Result<uint32_t> count(std::string_view key, uint32_t multiple, uint32_t high,
                         uint32_t otherwise) const;

  // The key `bucket`: a multiple of `multiple` that fits a header.
  Result<uint32_t> bucket(uint32_t multiple, uint32_t otherwise) const;

 private:
  [[nodiscard]] const std::string* find(std::string_view key) const noexcept;
  [[nodiscard]] Status bad_value(std::string_view key, const std::string& value,
                                 const std::string& valid) const;

  std::string codec_;
  std::vector<std::pair<std::string, std::string>> values_;
};

// Appends "key=value" to the text of a codec's parameters, behind a comma where there is text.
void append_parameter(std::string& text, std::string_view key, std::string_view value);

// The same for the key `bucket`, unless it is `otherwise`.
void append_bucket(std::string& text, uint32_t bucket, uint32_t otherwise);

// Shortest decimal that reads back as the same float32.
[[nodiscard]] std::string format_number(float value);

}  // namespace gradwire
