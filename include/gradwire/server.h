#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/exchange.h"

namespace gradwire {

// Dedicated servers (3LC, sections 2 and 3): the last ranks of a layout with `servers` hold the
// model and its optimizer, each tensor whole on one of them; the ranks before them are workers.
//
//   push  a worker encodes each server's tensors of its gradient; 1 packet to each server
//   pull  the server adds the pushes of one version in ascending order of ranks, divides by their
//         number, updates its model, and encodes the change once; all workers get the same bytes
//
// Bytes sent in a step for n values at b bits: by a worker n * b / 8, by the S servers together
// W * n * b / 8, plus headers; 2 messages on the longest way. Every value is quantized twice,
// whatever W; error feedback on both ways keeps the error of the running sum bounded. Server and
// workers differ by the server's residual, and workers at the same version hold the same bits.
//
// A *version* of a server's tensors is one update of them. A worker pushes for the version behind
// the last it pulled, or for one behind that within `staleness`. A push that comes after its
// version was finished is dropped, and answered with all versions that the worker lacks; its next
// push is then for the version under way. A step of a worker is for the oldest version that it has
// of any server: those of which it has a newer one get no push.
struct ServerOptions {
  // A worker that lacks more versions than are kept.
  enum class Behind : uint8_t {
    kRefuse,  // is an error that names it (kLimitExceeded), when it pushes
    kReport,  // stands in behind() until somebody gives it the model: see caught_up, catch_up
  };

  uint32_t backup = 0;     // a version is finished without the last so many of its pushes
  uint64_t staleness = 0;  // versions that a worker pushed and needs not have when it goes on
  uint64_t history = 64;   // finished versions that are kept for workers that are behind
  Behind behind = Behind::kRefuse;
};

// A server's side.
class GRADWIRE_EXPORT ServerSide : public Exchange {
 public:
  // Finished versions of this server's tensors: also the number of the one under way.
  [[nodiscard]] virtual uint64_t version() const = 0;
  // Where a run goes on, before its first step; by default all begin with version 0.
  // kUnexpectedMessage: a step was taken already.
  virtual Status set_version(uint64_t version) = 0;
  // Of each worker, the pushes that came too late.
  [[nodiscard]] virtual const std::vector<uint64_t>& dropped_pushes() const = 0;
  // With Behind::kReport: the workers that can only be helped by the model itself, as the other
  // workers have it at version().
  [[nodiscard]] virtual std::vector<uint32_t> behind() const = 0;
  // This worker is given that model. kInvalidArgument: it was not behind.
  virtual Status caught_up(uint32_t worker) = 0;
};

// A worker's side. `server` is a server's rank in all of these; kInvalidArgument where it is none.
class GRADWIRE_EXPORT WorkerSide : public Exchange {
 public:
  // Versions of the server's tensors that were applied here; 0 where the rank is no server.
  [[nodiscard]] virtual uint64_t version(uint32_t server) const = 0;
  // As for a server.
  virtual Status set_version(uint32_t server, uint64_t version) = 0;
  // By the server's rank, the pushes that this worker did not make, since it had newer versions of
  // that server than of another.
  [[nodiscard]] virtual const std::vector<uint64_t>& dropped_pushes() const = 0;
  // This worker has the server's tensors as of `version` now, beyond what it had, and pulls from
  // there. What was pushed for versions before is lost with its gradients. kInvalidArgument also
  // where the version is not ahead.
  virtual Status catch_up(uint32_t server, uint64_t version) = 0;
};

// Gets a finished version of the tensors of one server: their segments in `delta` (layout.numel()
// values) are to be added to the worker's model. Versions come one by one, in order, so that all
// workers round alike. A failure ends the exchange.
using ApplyDelta =
    std::function<Status(uint32_t server, uint64_t version, std::span<const float> delta)>;

// A worker's side. start() pushes the bucket, which is lent until the next start, and done() says
// that the next gradient may be computed: no more than `staleness` versions are pushed and not
// pulled. Then, too, receive() takes what comes. `step` goes into statistics alone.
//
// A version whose pushes were not finite is skipped by everyone: nothing is applied, and what this
// worker had sent for it goes back into its residuals. What was sent in a push that came too late
// is lost with its gradient. retract() does nothing.
//
// kInvalidArgument: rank is none of the workers; backup leaves no push to wait for.
GRADWIRE_EXPORT Result<std::unique_ptr<WorkerSide>> make_server_worker(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    const ServerOptions& options, ApplyDelta apply, uint64_t seed = 0);

// A server's side. start() begins the version `step`, which must be version(); done() says that
// it is finished. `update` gets the averages of this server's tensors in the bucket and leaves the
// model's change there. A version that is not finite is not updated. When it is finished, the
// bucket holds the change as workers decode it (unless it was not finite), so that a server can
// keep the model as they have it.
//
// Without backup a push of a finished version is an error.
//
// kInvalidArgument: rank is no server; backup leaves no push to wait for.
GRADWIRE_EXPORT Result<std::unique_ptr<ServerSide>> make_server(
    std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
    const ServerOptions& options, ShardUpdate update, uint64_t seed = 0);

}  // namespace gradwire
