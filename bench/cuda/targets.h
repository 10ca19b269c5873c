#pragma once

// Target speeds of the codecs on a GPU of the Hopper generation.

#include <cstdint>

namespace gradwire::cuda {

struct Measured {
  double encode_ms;         // with the residual that the codec keeps
  double encode_share;      // of the copy's bandwidth
  double decode_add_share;  // likewise
};

enum class BenchInput { kOneTensor, kSmallTensor, kResnet50 };  // in the order they are measured

struct Target {
  const char* name;
  BenchInput input;
  const char* codec;
  double (*take)(const Measured&);
  bool at_least;  // or below
  double limit;
};

inline constexpr uint64_t kTargetValues = uint64_t{256} << 20;  // of the one tensor

inline double encode_share(const Measured& measured) { return measured.encode_share; }
inline double decode_add_share(const Measured& measured) { return measured.decode_add_share; }
inline double encode_ms(const Measured& measured) { return measured.encode_ms; }

inline constexpr Target kTargets[] = {
    {"3lc encode, coder none, share of a copy", BenchInput::kOneTensor, "3lc:s=1.75,coder=none",
     encode_share, true, 0.85},
    {"3lc encode, coder zre, share of a copy", BenchInput::kOneTensor, "3lc:s=1.75", encode_share,
     true, 0.75},
    {"3lc encode, coder rice, share of a copy", BenchInput::kOneTensor, "3lc:s=1.75,coder=rice",
     encode_share, true, 0.70},
    {"3lc decode_add, coder none, share of a copy", BenchInput::kOneTensor, "3lc:s=1.75,coder=none",
     decode_add_share, true, 0.75},
    {"3lc decode_add, coder zre, share of a copy", BenchInput::kOneTensor, "3lc:s=1.75",
     decode_add_share, true, 0.75},
    {"3lc decode_add, coder rice, share of a copy", BenchInput::kOneTensor, "3lc:s=1.75,coder=rice",
     decode_add_share, true, 0.75},
    {"qsgd encode, share of a copy", BenchInput::kOneTensor, "qsgd:bits=4", encode_share, true,
     0.80},
    {"terngrad encode, share of a copy", BenchInput::kOneTensor, "terngrad", encode_share, true,
     0.80},
    {"int8 encode, share of a copy", BenchInput::kOneTensor, "int8", encode_share, true, 0.80},
    {"inceptionn encode, share of a copy", BenchInput::kOneTensor, "inceptionn", encode_share, true,
     0.80},
    {"3lc encode, 2^20 values, ms", BenchInput::kSmallTensor, "3lc:s=1.75", encode_ms, false, 0.03},
    {"3lc encode, ResNet-50 in one bucket, ms", BenchInput::kResnet50, "3lc:s=1.75", encode_ms,
     false, 0.2},
};

}  // namespace gradwire::cuda
