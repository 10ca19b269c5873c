#pragma once

#include <cstdint>

namespace gradwire {

enum class SentAs : uint8_t { kFloat32 = 0, kBfloat16 = 1 };
enum class IndexCoder : uint8_t { kBitmap = 0, kRice = 1 };

// A coded index says how many bytes it has.
inline constexpr uint64_t kIndexSizeBytes = 2;

struct TopkParameters {
  float ratio = 0.05f;  // the encoder's business alone
  SentAs values = SentAs::kFloat32;
  IndexCoder index = IndexCoder::kBitmap;
};

}  // namespace gradwire
