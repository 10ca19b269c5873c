#include "gradwire/exchange_choice.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>
#include <vector>

#include "base/parse.h"
#include "base/return_if_error.h"
#include "base/suggestion.h"
#include "exchange/steps/exchange_entry.h"
#include "gradwire/codec.h"

namespace gradwire {
namespace {

constexpr const ExchangeEntry* kEntries[] = {
#define GW_EXCHANGE(symbol) &exchange_entries::symbol,
#include "exchange/exchanges.def"
#undef GW_EXCHANGE
};

// "sharded, ring, hierarchical[:between=EXCHANGE,ranks=RANKS]"
std::string valid_exchanges() {
  std::string valid;
  for (const ExchangeInfo* info : exchanges()) {
    valid += (valid.empty() ? "" : ", ") + std::string(info->name);
    std::string keys;
    for (const CodecParameter& parameter : info->parameters) {
      keys += (keys.empty() ? "" : ",") + std::string(parameter.name) + "=" +
              std::string(parameter.values);
    }
    if (!keys.empty()) valid += "[:" + keys + "]";
  }
  return valid;
}

const ExchangeInfo* find_info(std::string_view name) {
  const auto found = std::ranges::find(exchanges(), name, &ExchangeInfo::name);
  return found == exchanges().end() ? nullptr : *found;
}

// The codec's full text. Nothing inside a machine keeps a residual: only speakers have checkpoints
// that are moved between worlds of other sizes.
Result<std::string> parse_within_codec(std::string_view text) {
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<const Codec> codec, Codec::parse(text));
  if (codec->residual_type() == ResidualType::kNone) return codec->text();
  return Status(StatusCode::kInvalidArgument, "within_codec=" + codec->text() +
                                                  ": no residual is kept inside a machine; add "
                                                  "ef=off");
}

}  // namespace

std::span<const ExchangeInfo* const> exchanges() noexcept {
  static const auto kInfos = [] {
    std::array<const ExchangeInfo*, std::size(kEntries)> infos{};
    std::ranges::transform(kEntries, infos.begin(), &ExchangeEntry::info);
    return infos;
  }();
  return kInfos;
}

std::string_view route_name(Route route) {
  switch (route) {
    case Route::kToOwners:
      return "to_owners";
    case Route::kFromOwners:
      return "from_owners";
    case Route::kAround:
      return "around";
    case Route::kToAll:
      return "to_all";
  }
  return "";
}

Result<ExchangeChoice> ExchangeChoice::parse(std::string_view text) {
  const auto invalid = [whole = text] {
    const std::string meant = with_usual_punctuation(whole);
    const bool is_hint = meant != whole && parse(meant).ok();
    return Status(StatusCode::kInvalidArgument,
                  "'" + std::string(whole) + "' is no exchange; valid ones are: " +
                      valid_exchanges() + (is_hint ? ". Did you mean '" + meant + "'?" : ""));
  };
  const bool has_parameters = text.find(':') != std::string_view::npos;
  ExchangeChoice choice;
  choice.info_ = find_info(take_until(text, ':'));
  if (choice.info_ == nullptr || (has_parameters && text.empty()) || text.ends_with(',')) {
    return invalid();
  }
  choice.inner_ = choice.info_->between_machines ? exchange_entries::sharded.info : choice.info_;
  std::vector<std::string_view> given;
  while (!text.empty()) {
    const std::string_view rest = text;  // from this key on
    std::string_view value = take_until(text, ',');
    const std::string_view key = take_until(value, '=');
    if (std::ranges::count(choice.info_->parameters, key, &CodecParameter::name) == 0)
      return invalid();
    if (std::ranges::count(given, key) > 0) {
      return Status(StatusCode::kInvalidArgument,
                    "an exchange's parameter '" + std::string(key) + "' is given twice");
    }
    given.push_back(key);
    GW_ASSIGN_OR_RETURN(const bool is_set, choice.set(key, value, rest));
    if (!is_set) return invalid();
    if (key == "within_codec") break;  // the rest is the codec
  }
  return choice;
}

Result<bool> ExchangeChoice::set(std::string_view key, std::string_view value,
                                 std::string_view rest) {
  if (info_->has_servers) return set_of_server(key, value);
  if (key == "between" || key == "within") {
    const ExchangeInfo* found = find_info(value);
    if (found == nullptr || found->between_machines || found->has_servers) return false;
    (key == "between" ? inner_ : within_) = found;
    return true;
  }
  if (key == "within_codec") {
    const std::string_view codec = rest.substr(std::min(key.size() + 1, rest.size()));
    GW_ASSIGN_OR_RETURN(within_codec_, parse_within_codec(codec));
    return true;
  }
  if (!parse_whole(value, ranks_per_machine_) || ranks_per_machine_ == 0 ||
      ranks_per_machine_ > kMaxWorldSize) {
    return Status(StatusCode::kInvalidArgument, "an exchange's ranks= is '" + std::string(value) +
                                                    "'; a machine has 1 to " +
                                                    std::to_string(kMaxWorldSize) + " ranks");
  }
  return true;
}

bool ExchangeChoice::set_of_server(std::string_view key, std::string_view value) {
  const auto choose = [&](std::string_view first, std::string_view second, auto& target, auto a,
                          auto b) {
    target = value == first ? a : b;
    return value == first || value == second;
  };
  using enum ServerOptions::Pulls;
  using enum ServerOptions::Turns;
  using enum ServerOptions::Behind;
  if (key == "pulls") return choose("updates", "gradients", server_.pulls, kUpdates, kGradients);
  if (key == "turns") return choose("own", "any", server_.turns, kOwn, kAny);
  if (key == "behind") return choose("refuse", "report", server_.behind, kRefuse, kReport);
  if (key == "backup") return parse_whole(value, server_.backup);
  return parse_whole(value, key == "staleness" ? server_.staleness : server_.history);
}

std::string ServerOptions::text() const {
  constexpr ServerOptions kDefault;
  std::string keys;
  const auto add = [&](bool differs, std::string_view key, const std::string& value) {
    if (differs) keys += (keys.empty() ? ":" : ",") + std::string(key) + "=" + value;
  };
  add(pulls != kDefault.pulls, "pulls", "gradients");
  add(backup != kDefault.backup, "backup", std::to_string(backup));
  add(turns != kDefault.turns, "turns", "any");
  add(staleness != kDefault.staleness, "staleness", std::to_string(staleness));
  add(history != kDefault.history, "history", std::to_string(history));
  add(behind != kDefault.behind, "behind", "report");
  return std::string(exchange_entries::server.info->name) + keys;
}

std::string ExchangeChoice::text() const {
  if (info_->has_servers) return server_.text();
  std::string text(info_->name);
  if (info_ != inner_) text += ":between=" + std::string(inner_->name);
  if (within_ != nullptr) text += ",within=" + std::string(within_->name);
  if (ranks_per_machine_ > 0) text += ",ranks=" + std::to_string(ranks_per_machine_);
  if (compresses_within()) text += ",within_codec=" + within_codec_;
  return text;
}

ExchangeChoice ExchangeChoice::uncompressed() const {
  ExchangeChoice choice = *this;
  choice.within_codec_ = kUncompressed;
  return choice;
}

Result<std::unique_ptr<Exchange>> make_exchange(std::string_view text, ExchangeSetup setup) {
  GW_ASSIGN_OR_RETURN(ExchangeChoice choice, ExchangeChoice::parse(text));
  return make_exchange(choice.info(), choice, std::move(setup));
}

Result<std::unique_ptr<Exchange>> make_exchange(const ExchangeInfo& info,
                                                const ExchangeChoice& choice, ExchangeSetup setup) {
  const auto refuse = [&](const std::string& why) {
    return Status(StatusCode::kInvalidArgument,
                  "the " + std::string(info.name) + " exchange " + why);
  };
  if (setup.options.reduction == Reduction::kSum && !info.sums) {
    return refuse("averages; it can't give the sum");
  }
  if (setup.options.update && !info.updates) return refuse("takes no update");
  if (setup.options.apply && !info.has_servers) return refuse("has no workers that apply updates");
  if (!setup.options.machine_of_rank.empty() && !info.between_machines) {
    return refuse("does not ask for the machine of each rank");
  }
  const auto entry = std::ranges::find(kEntries, &info, &ExchangeEntry::info);
  return (*entry)->make(choice, setup);
}

Result<std::unique_ptr<Exchange>> make_allgather_exchange(const ExchangeInfo* info,
                                                          ExchangeSetup setup) {
  const auto entry = std::ranges::find(kEntries, info, &ExchangeEntry::info);
  if (entry == std::end(kEntries) || (*entry)->make_allgather == nullptr) {
    return make_allgather_exchange(std::move(setup));
  }
  return (*entry)->make_allgather(setup);
}

}  // namespace gradwire
