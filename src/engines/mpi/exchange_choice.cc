// The exchange of an all-reduce, by name.

#include <charconv>
#include <string>

#include "gradwire/mpi.h"

namespace gradwire::mpi {
namespace {

constexpr std::string_view kHierarchical = "hierarchical";

Status no_such_exchange(std::string_view text) {
  return {StatusCode::kInvalidArgument,
          "'" + std::string(text) +
              "' is no exchange; valid ones are: sharded, ring, terngrad, "
              "hierarchical[:between=EXCHANGE,ranks=RANKS_PER_MACHINE]"};
}

// Whether the parameter is known and its value will do.
bool set_parameter(std::string_view parameter, Options& options) {
  const size_t equals = parameter.find('=');
  if (equals == std::string_view::npos) return false;
  const std::string_view key = parameter.substr(0, equals);
  const std::string_view value = parameter.substr(equals + 1);
  if (key == "between") {
    const Result<ExchangeKind> between = parse_exchange(value);
    if (between.ok()) options.exchange = between.value();
    return between.ok();
  }
  const char* const end = value.data() + value.size();
  const auto [rest, error] = std::from_chars(value.data(), end, options.ranks_per_machine);
  return key == "ranks" && error == std::errc() && rest == end && options.ranks_per_machine > 0;
}

}  // namespace

Status set_exchange(std::string_view text, Options& options) {
  Options chosen;
  const size_t colon = text.find(':');
  if (text.substr(0, colon) != kHierarchical) {
    const Result<ExchangeKind> kind = parse_exchange(text);
    if (!kind.ok()) return no_such_exchange(text);
    chosen.exchange = kind.value();
  } else {
    chosen.hierarchical = true;
    std::string_view rest = colon == std::string_view::npos ? "" : text.substr(colon + 1);
    if (colon != std::string_view::npos && rest.empty()) return no_such_exchange(text);
    while (!rest.empty()) {
      const size_t comma = rest.find(',');
      if (!set_parameter(rest.substr(0, comma), chosen)) return no_such_exchange(text);
      rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
    }
  }
  options.exchange = chosen.exchange;
  options.hierarchical = chosen.hierarchical;
  options.ranks_per_machine = chosen.ranks_per_machine;
  return {};
}

std::string exchange_text(const Options& options) {
  std::string kind(exchange_name(options.exchange));
  if (!options.hierarchical) return kind;
  return std::string(kHierarchical) + ":between=" + kind +
         (options.ranks_per_machine == 0 ? ""
                                         : ",ranks=" + std::to_string(options.ranks_per_machine));
}

}  // namespace gradwire::mpi
