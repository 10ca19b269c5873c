#pragma once

#include "engines/mpi/buffers.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {

enum class Memory : uint8_t { kForgets, kKeepsResiduals };  // from one start to the next

class OperationMaker {
 public:
  // If this rank can't take part, the other ranks receive the reason.
  static Result<Operation> make(const Request& request, const Options& options,
                                Memory memory = Memory::kKeepsResiduals);
  // Makes and starts an operation.
  static Result<Operation> start(const Request& request, const Options& options);
  // Makes and starts an operation, and waits for it.
  static Status run(const Request& request, const Options& options);
};

}  // namespace gradwire::mpi
