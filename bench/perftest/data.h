#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradwire/status.h"

namespace gradwire::perftest {

// Values for all-reduce: one period, repeated to any length.
class Data {
 public:
  // "synthetic": 0.01 * g * exp(h / 2), g and h standard normal, independent. Else the path of a
  // safetensors file, whose float32 tensors are each divided by their largest magnitude and lie one
  // after the other. kInvalidArgument: the file can't be read or has no such tensors.
  static Result<Data> load(const std::string& choice);

  // The n values of one rank in one repetition. They are the period from a place that depends on
  // the repetition and is the same on all ranks. Each value is multiplied by its own factor between
  // 0.9 and 1.1.
  void fill(uint32_t rank, uint64_t repetition, std::vector<float>& values) const;

 private:
  std::vector<float> period_;
};

}  // namespace gradwire::perftest
