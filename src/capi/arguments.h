#pragma once

// Reads arguments of the C API. The functions are inline because libgradwire_mpi uses them too.

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "gradwire/layout.h"

namespace gradwire::capi {

// kInvalidArgument unless index < count.
inline Status check_index(size_t index, size_t count) {
  if (index < count) return {};
  return {StatusCode::kInvalidArgument,
          "index " + std::to_string(index) + " is not below the count of " + std::to_string(count)};
}

inline Result<Dtype> read_dtype(gw_dtype dtype) {
  if (dtype == GW_F32 || dtype == GW_BF16 || dtype == GW_F16) return static_cast<Dtype>(dtype);
  return Status(
      StatusCode::kUnsupportedDtype,
      "dtype " + std::to_string(dtype) + "; valid ones are 0 (GW_F32), 1 (GW_BF16) and 2 (GW_F16)");
}

inline Result<std::vector<TensorInfo>> read_tensors(const gw_tensor* tensors, size_t count) {
  GW_RETURN_IF_ERROR(check_given({{"tensors", tensors, count}}));
  std::vector<TensorInfo> infos;
  for (const gw_tensor& tensor : std::span(tensors, count)) {
    GW_RETURN_IF_ERROR(check_given(
        {{"a tensor's name", tensor.name}, {"a tensor's dims", tensor.dims, tensor.dim_count}}));
    infos.push_back({.name = tensor.name, .dims = {tensor.dims, tensor.dims + tensor.dim_count}});
  }
  return infos;
}

inline Result<LayoutRule> read_rule(const gw_rule& rule) {
  GW_RETURN_IF_ERROR(
      check_given({{"a rule's pattern", rule.pattern}, {"a rule's codec", rule.codec}}));
  LayoutRule read{.pattern = rule.pattern, .codec = rule.codec};
  if (rule.direction < GW_PUSH_AND_PULL || rule.direction > GW_PULL) {
    return Status(StatusCode::kInvalidArgument,
                  "direction " + std::to_string(rule.direction) +
                      "; valid ones are 0 (GW_PUSH_AND_PULL), 1 (GW_PUSH) and 2 (GW_PULL)");
  }
  if (rule.direction != GW_PUSH_AND_PULL) {
    read.direction = rule.direction == GW_PUSH ? Direction::kPush : Direction::kPull;
  }
  return read;
}

// Given: a gw_layout_options, or a struct with fields of the same names.
template <typename Given>
Result<LayoutOptions> read_layout_options(const Given& given) {
  GW_RETURN_IF_ERROR(check_given({{"the options' codec", given.codec},
                                  {"rules", given.rules, given.rule_count},
                                  {"exclude", given.exclude, given.exclude_count}}));
  LayoutOptions read{.codec = given.codec,
                     .pull_codec = given.pull_codec == nullptr ? "" : given.pull_codec,
                     .min_numel = given.min_numel};
  for (const gw_rule& rule : std::span(given.rules, given.rule_count)) {
    GW_ASSIGN_OR_RETURN(LayoutRule one, read_rule(rule));
    read.rules.push_back(std::move(one));
  }
  for (const char* pattern : std::span(given.exclude, given.exclude_count)) {
    GW_RETURN_IF_ERROR(check_given({{"a pattern of exclude", pattern}}));
    read.exclude.emplace_back(pattern);
  }
  return read;
}

}  // namespace gradwire::capi
