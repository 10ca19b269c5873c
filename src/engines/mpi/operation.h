#pragma once

#include <memory>
#include <optional>

#include "engines/mpi/buffers.h"
#include "gradwire/execution.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {

enum class Memory : uint8_t { kForgets, kKeepsResiduals };  // from one start to the next

class Operation::Implementation {
 public:
  Implementation(Engine engine, Buffers buffers, Execution execution);

  Status start();
  Result<bool> test();
  Status wait();
  [[nodiscard]] Engine& engine() noexcept { return engine_; }

 private:
  Status finish();

  Engine engine_;
  Buffers buffers_;
  Execution execution_;
  uint64_t step_ = 0;
  bool started_ = false;
};

class OperationMaker {
 public:
  // Tells the others where this rank can't take part.
  static Result<Operation> make(const Request& request, const Options& options, Memory memory);
  // Made, started, waited for.
  static Status run(const Request& request, const Options& options);
};

}  // namespace gradwire::mpi
