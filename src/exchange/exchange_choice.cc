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
    case Route::kToOwners: return "to_owners";
    case Route::kFromOwners: return "from_owners";
    case Route::kAround: return "around";
    case Route::kToAll: return "to_all";
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
    if (key == "between" || key == "within") {
      const ExchangeInfo* found = find_info(value);
      if (found == nullptr || found->between_machines) return invalid();
      (key == "between" ? choice.inner_ : choice.within_) = found;
    } else if (key == "within_codec") {
      const std::string_view codec = rest.substr(std::min(key.size() + 1, rest.size()));
      GW_ASSIGN_OR_RETURN(choice.within_codec_, parse_within_codec(codec));
      break;
    } else if (!parse_whole(value, choice.ranks_per_machine_) || choice.ranks_per_machine_ == 0 ||
               choice.ranks_per_machine_ > kMaxWorldSize) {
      return Status(StatusCode::kInvalidArgument, "an exchange's ranks= is '" + std::string(value) +
                                                      "'; a machine has 1 to " +
                                                      std::to_string(kMaxWorldSize) + " ranks");
    }
  }
  return choice;
}

std::string ExchangeChoice::text() const {
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
