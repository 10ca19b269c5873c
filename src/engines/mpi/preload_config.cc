#include "engines/mpi/preload_config.h"

#include <charconv>
#include <fstream>
#include <string_view>

#include "base/return_if_error.h"

namespace gradwire::mpi {
namespace {

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

template <typename T>
bool parse_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Whether the key is known and the value will do.
bool set(std::string_view key, std::string_view value, PreloadConfig& config) {
  Options& options = config.options;
  if (key == "codec" || key == "pull-codec") {
    (key == "codec" ? options.codec : options.pull_codec) = value;
    return !value.empty();
  }
  if (key == "exchange") return options.exchange = value, true;
  if (key == "min-bytes") return parse_number(value, config.min_bytes);
  if (key == "threads") return parse_number(value, options.threads);
  if (key == "seed") return parse_number(value, options.seed);
  if (key == "timeout") return parse_number(value, options.timeout_seconds);
  return false;
}

Status check_codec(const std::string& text) {
  return text.empty() ? Status() : Codec::parse(text).status();
}

}  // namespace

Result<PreloadConfig> read_preload_config(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Status(StatusCode::kInvalidArgument, path + ": can't be read");
  PreloadConfig config;
  int number = 0;
  for (std::string text; std::getline(file, text);) {
    ++number;
    const std::string_view line = trim(std::string_view(text).substr(0, text.find('#')));
    if (line.empty()) continue;
    const size_t equals = line.find('=');
    const bool known = equals != std::string_view::npos &&
                       set(trim(line.substr(0, equals)), trim(line.substr(equals + 1)), config);
    if (!known) {
      return Status(
          StatusCode::kInvalidArgument,
          path + ":" + std::to_string(number) + ": '" + std::string(line) +
              "' is no line of key = value; keys: codec, pull-codec, exchange, min-bytes, "
              "threads, seed, timeout");
    }
  }
  if (config.options.codec.empty()) {
    return Status(StatusCode::kInvalidArgument, path + ": has no line 'codec = ...'");
  }
  GW_RETURN_IF_ERROR(check_codec(config.options.codec));
  GW_RETURN_IF_ERROR(check_codec(config.options.pull_codec));
  const Result<ExchangeChoice> exchange = ExchangeChoice::parse(config.options.exchange);
  if (!exchange.ok()) return exchange.status();
  config.options.exchange = exchange.value().text();
  return config;
}

}  // namespace gradwire::mpi
