#include "base/suggestion.h"

#include <vector>

namespace gradwire {
namespace {

// std::isalnum and std::tolower follow the program's locale.
bool is_in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
         std::string_view(".=-_+").find(c) != std::string_view::npos;
}

// No space around a "=" divides words.
std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  bool begins = true;
  for (char c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (!is_in_word(c)) {
      begins = words.empty() || words.back().back() != '=';
      continue;
    }
    if (words.empty() || (begins && c != '=')) words.emplace_back();
    words.back() += c;
    begins = false;
  }
  return words;
}

bool is_value(const std::string& word) { return word.find('=') == std::string::npos; }

}  // namespace

std::string with_usual_punctuation(std::string_view text) {
  std::string usual;
  const std::vector<std::string> words = words_of(text);
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) usual += i == 1 ? ':' : ',';
    usual += words[i];
    // "s:1" and "bits 4" have a word for the key and one for the value.
    if (i > 0 && i + 1 < words.size() && is_value(words[i]) && is_value(words[i + 1])) {
      usual += '=' + words[++i];
    }
  }
  return usual;
}

}  // namespace gradwire
