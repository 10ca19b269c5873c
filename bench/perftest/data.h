#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradwire/status.h"

namespace gradwire::perftest {

// Values to all-reduce: one period of them, repeated to any length.
class Data {
 public:
  // "synthetic": 0.01 * g * exp(h / 2), g and h standard normal, independent. Else the path of a
  // safetensors file, whose float32 tensors are each divided by their largest magnitude and lie one
  // behind the other. kInvalidArgument: it can't be read or holds none.
  static Result<Data> load(const std::string& choice);

  // n values of one rank in one repetition: the period from a place that the repetition chooses,
  // the same on all ranks, each value times a factor of its own between 0.9 and 1.1.
  void fill(uint32_t rank, uint64_t repetition, std::vector<float>& values) const;

 private:
  std::vector<float> period_;
};

}  // namespace gradwire::perftest
