#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/execution.h"

namespace gradwire::fuzzing {

// Unless `condition` holds, ends the process, so that libFuzzer keeps the input.
void require(bool condition, std::string_view what);

// Every SIMD target of this CPU, including "scalar", with one thread and with two. They are made
// once.
[[nodiscard]] std::vector<Execution>& executions();

// A copy of `data` in memory of exactly its size, so that AddressSanitizer sees a read past its
// end.
[[nodiscard]] std::vector<std::byte> exact_copy(std::span<const uint8_t> data);

// Larger tensors are skipped: they only cost time.
inline constexpr uint64_t kMaxFuzzedNumel = 1 << 17;

// Stores and adds the values of a payload with every execution. All must agree in the status and,
// if it is ok, in every bit.
void check_decoders(const Codec& codec, std::span<const std::byte> payload, uint64_t n);

}  // namespace gradwire::fuzzing
