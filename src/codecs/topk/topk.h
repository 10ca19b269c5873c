#pragma once

#include <cstdint>

namespace gradwire {

enum class SentAs : uint8_t { kFloat32 = 0, kBfloat16 = 1 };
enum class IndexCoder : uint8_t { kBitmap = 0, kRice = 1 };

// Bytes of the size that stands before an index in rice code.
inline constexpr uint64_t kIndexSizeBytes = 2;

struct TopkParameters {
  float ratio = 0.05f;  // only the encoder uses it
  SentAs values = SentAs::kFloat32;
  IndexCoder index = IndexCoder::kBitmap;
};

}  // namespace gradwire
