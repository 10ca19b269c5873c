#pragma once

#include "engines/mpi/buffers.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {

enum class Memory : uint8_t { kForgets, kKeepsResiduals };  // from one start to the next

class OperationMaker {
 public:
  // Where this rank can't take part, the others get to know why.
  static Result<Operation> make(const Request& request, const Options& options,
                                Memory memory = Memory::kKeepsResiduals);
  // Made and started.
  static Result<Operation> start(const Request& request, const Options& options);
  // Made, started, waited for.
  static Status run(const Request& request, const Options& options);
};

}  // namespace gradwire::mpi
