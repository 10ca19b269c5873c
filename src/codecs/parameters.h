#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/status.h"

namespace gradwire {

// The key=value list after a codec's name. status() keeps the error of the first value that is not
// valid: kBadParameter, with the valid values. Callers check it once, after all values.
class Parameters {
 public:
  // Accepts the keys of `info` and the common ones, each at most once. `text` is the codec's text
  // from its colon on, or empty.
  static Result<Parameters> parse(const CodecInfo& info, std::string_view text);

  [[nodiscard]] bool has(std::string_view key) const noexcept;
  [[nodiscard]] const Status& status() const noexcept { return status_; }
  // Sets status() to "codec '3lc': <what>", unless it holds an error already.
  void fail(const std::string& what);

  // The value by its place among `names`, or `otherwise` where the key is absent.
  template <typename E>
  E choice(std::string_view key, std::span<const std::string_view> names, E otherwise) {
    return static_cast<E>(place(key, names, static_cast<size_t>(otherwise)));
  }

  // A float32 in [low, high), which `valid` describes to people; empty: by these bounds.
  float number(std::string_view key, float low, float high, float otherwise,
               std::string_view valid = {});

  // A multiple of `multiple` in [multiple, high].
  uint32_t count(std::string_view key, uint32_t multiple, uint32_t high, uint32_t otherwise);

  // The key `bucket`, the size of a group: a multiple of `multiple` that fits a header.
  uint32_t group_size(uint32_t multiple, uint32_t otherwise);

 private:
  size_t place(std::string_view key, std::span<const std::string_view> names, size_t otherwise);
  [[nodiscard]] const std::string* find(std::string_view key) const noexcept;
  void refuse(std::string_view key, const std::string& value, const std::string& valid);

  std::string codec_;
  std::vector<std::pair<std::string, std::string>> values_;
  Status status_;
};

// Appends "key=value" to the text of a codec's parameters, after a comma where there is text.
void append_parameter(std::string& text, std::string_view key, std::string_view value);

// The same for a value by its place among `names`, unless it is `otherwise`.
template <typename E>
void append_choice(std::string& text, std::string_view key, std::span<const std::string_view> names,
                   E value, E otherwise) {
  if (value != otherwise) append_parameter(text, key, names[static_cast<size_t>(value)]);
}

// The same for the key `bucket`.
void append_group_size(std::string& text, uint32_t size, uint32_t otherwise);

// Shortest decimal that reads back as the same float32.
[[nodiscard]] std::string format_number(float value);

}  // namespace gradwire
