#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "gradwire/codec.h"
#include "gradwire/direction.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

// How the packets of a leg travel. A shard is the part of the bucket that one rank owns.
enum class Route : uint8_t {
  kToOwners,    // every rank sends each owner its shard
  kFromOwners,  // every owner sends its shard to all ranks
  kAround,      // every shard goes around a ring of N ranks in N - 1 hops
  kToAll,       // every rank sends the whole bucket to all others
};

// The name in Python and in messages: "to_owners".
[[nodiscard]] GRADWIRE_EXPORT std::string_view route_name(Route route);

// One of the legs that an exchange takes one after the other. A pull that goes around a ring is
// passed on as it is; a push is decoded, added to and encoded anew by each rank on the way.
struct ExchangeLeg {
  Route route;
  Direction direction;
};

struct ExchangeInfo {
  std::string_view name;
  std::string_view summary;
  std::string_view source;  // paper and section
  // The codec to take where the user names none and residuals are kept from step to step; with
  // parameters, that of ExchangeChoice::inner().
  std::string_view default_codec;
  // Whether it can give the sum over the ranks instead of the average.
  bool sums = true;
  // Whether it takes a ShardUpdate.
  bool updates = false;
  // Whether each value has an owner, which sums it and sends the result to all ranks in a pull.
  // Otherwise there are no pulls, and every rank sums all values.
  bool has_owners = true;
  // Whether each rank on the way encodes a sum again, so that its error and, with some codecs, its
  // scale grow with the number of ranks.
  bool encodes_sums_on_the_way = false;
  // Whether it adds trits with scales that all ranks share. It takes terngrad, or codecs without a
  // residual.
  bool adds_trits = false;
  // Whether all ranks skip a step that is not finite even if no rank keeps a residual.
  bool always_skips_non_finite = false;
  // Whether one rank of each machine takes part in another exchange for the others.
  bool between_machines = false;
  // Whether the layout's servers own all values, and the other ranks are their workers.
  bool has_servers = false;
  // Whether codecs can be chosen at run time ("auto:bits=1"): each rank encodes nothing but its own
  // gradient in the pushes, and the result in the pulls.
  bool chooses_codecs = false;
  // Whether each leg is also an exchange of its own: make_reduce_scatter_exchange and
  // make_allgather_exchange.
  bool has_single_legs = false;
  // Its legs, in order; cost_of (exchange_cost.h) counts what they cost. Empty for exchanges
  // between machines, which take those of ExchangeChoice::inner().
  std::span<const ExchangeLeg> legs = {};
  // The legs of the scales, before the others, if trits share scales.
  std::span<const ExchangeLeg> scale_legs = {};
  std::span<const CodecParameter> parameters = {};
};

// The parameters of the exchange `server` (gradwire/server.h).
struct GRADWIRE_EXPORT ServerOptions {
  // What a version is.
  enum class Pulls : uint8_t {
    kUpdates,    // the change of the server's model
    kGradients,  // the average of the pushes
  };
  // Whose pushes a version counts.
  enum class Turns : uint8_t {
    kOwn,  // one of each worker
    kAny,  // also further ones of a worker, in the turns of those that are behind
  };
  // What happens to a worker that lacks more versions than `history` keeps.
  enum class Behind : uint8_t {
    kRefuse,  // its push is an error that names it (kLimitExceeded)
    kReport,  // behind() lists it until it is given the model: see caught_up, catch_up
  };

  Pulls pulls = Pulls::kUpdates;
  uint32_t backup = 0;  // a version is finished without its last `backup` pushes
  Turns turns = Turns::kOwn;
  uint64_t staleness = 0;  // versions that a worker may have pushed and not pulled when it goes on
  uint64_t history = 64;   // finished versions that are kept for late workers
  Behind behind = Behind::kRefuse;

  // The exchange with these parameters: "server", "server:pulls=gradients".
  [[nodiscard]] std::string text() const;
};

// Every exchange, in the order of src/exchange/exchanges.def.
[[nodiscard]] GRADWIRE_EXPORT std::span<const ExchangeInfo* const> exchanges() noexcept;

// An exchange with its parameters: "sharded", "hierarchical:between=ring,ranks=4".
// within_codec stands last, because the text of a codec has commas of its own.
class GRADWIRE_EXPORT ExchangeChoice {
 public:
  // kInvalidArgument: the message lists what is valid.
  static Result<ExchangeChoice> parse(std::string_view text);

  [[nodiscard]] const ExchangeInfo& info() const noexcept { return *info_; }
  // The exchange of the ranks that keep residuals: `between` of a hierarchical exchange, else
  // info().
  [[nodiscard]] const ExchangeInfo& inner() const noexcept { return *inner_; }
  // The exchange `within` each machine of a hierarchical exchange; null if it is not given.
  [[nodiscard]] const ExchangeInfo* within() const noexcept { return within_; }
  // The codec inside each machine of a hierarchical exchange.
  [[nodiscard]] const std::string& within_codec() const noexcept { return within_codec_; }
  [[nodiscard]] bool compresses_within() const { return within_codec_ != kUncompressed; }
  // The same exchange without a codec of its own inside a machine, for steps that go raw.
  [[nodiscard]] ExchangeChoice uncompressed() const;
  // The parameter `ranks` of a hierarchical exchange; 0 if it is not given.
  [[nodiscard]] uint32_t ranks_per_machine() const noexcept { return ranks_per_machine_; }
  // The parameters of an exchange with servers.
  [[nodiscard]] const ServerOptions& server() const noexcept { return server_; }
  // parse(text()) gives an equal choice.
  [[nodiscard]] std::string text() const;

 private:
  static constexpr std::string_view kUncompressed = "raw";

  // `rest`: the text from this key on. False: the key has no such value.
  Result<bool> set(std::string_view key, std::string_view value, std::string_view rest);
  bool set_of_server(std::string_view key, std::string_view value);

  const ExchangeInfo* info_ = nullptr;
  const ExchangeInfo* inner_ = nullptr;
  const ExchangeInfo* within_ = nullptr;
  std::string within_codec_{kUncompressed};
  uint32_t ranks_per_machine_ = 0;
  ServerOptions server_;
};

}  // namespace gradwire
