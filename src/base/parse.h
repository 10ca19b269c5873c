#pragma once

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

namespace gradwire {

// Whether all of `text` is a number, which becomes `value`.
template <typename T>
bool parse_whole(std::string_view text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

// Returns the part of `text` before the next separator, and removes both from `text`.
inline std::string_view take_until(std::string_view& text, char separator) {
  const std::string_view taken = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(taken.size() + 1, text.size()));
  return taken;
}

}  // namespace gradwire
