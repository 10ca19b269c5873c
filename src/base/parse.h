#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
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

// Whether `text` is a size such as 100, 64K, 1M or 2G, which becomes `bytes`. The suffixes are
// powers of 1024.
inline bool parse_size(std::string_view text, uint64_t& bytes) {
  constexpr std::string_view kSuffixes = "KMG";
  const size_t power = text.empty() ? kSuffixes.npos : kSuffixes.find(text.back());
  const size_t shift = power == kSuffixes.npos ? 0 : 10 * (power + 1);
  if (shift > 0) text.remove_suffix(1);
  if (!parse_whole(text, bytes) || bytes > UINT64_MAX >> shift) return false;
  bytes <<= shift;
  return true;
}

// Returns the part of `text` before the next separator, and removes both from `text`.
inline std::string_view take_until(std::string_view& text, char separator) {
  const std::string_view taken = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(taken.size() + 1, text.size()));
  return taken;
}

}  // namespace gradwire
