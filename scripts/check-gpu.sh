#!/usr/bin/env bash
# Builds, tests and measures the codecs on the GPU of this machine, and keeps the table.
#
# Usage: scripts/check-gpu.sh [OUTPUT]
#   OUTPUT  where the table goes besides the terminal (default: bench/results/cuda.txt)
#
# Needs nvcc, cmake, ninja or make, a C++20 compiler and an NVIDIA GPU; Highway, xxHash and
# GoogleTest are fetched where they are not installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:-bench/results/cuda.txt}

command -v nvidia-smi >/dev/null || { echo "check-gpu.sh: there is no NVIDIA GPU here" >&2 && exit 1; }
command -v nvcc >/dev/null || { echo "check-gpu.sh: there is no nvcc here" >&2 && exit 1; }

build=build/gpu
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native \
  -DGRADWIRE_TESTS=ON -DGRADWIRE_BENCH=ON -DGRADWIRE_MPI=OFF
cmake --build "$build" --target cuda_test cuda_bench --parallel "$(nproc)"
"$build/tests/cuda/cuda_test"

mkdir -p "$(dirname "$output")"
{
  echo "# scripts/check-gpu.sh, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F)"
  echo "# $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1), $(nvcc --version | sed -n 's/.*release \(.*\),.*/nvcc \1/p')"
  echo "# share: of the bandwidth of a copy in the GPU's memory, in bytes moved (bench/cuda/cuda_bench.cc)"
  "$build/bench/cuda_bench"
} | tee "$output"
