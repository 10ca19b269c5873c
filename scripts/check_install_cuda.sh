#!/usr/bin/env bash
# Installs the build of the preset cuda, shared and static, into build/install-prefix, and builds
# and runs examples/cuda against it. Without a GPU the example must say that there is none.
#
# Usage: scripts/check_install_cuda.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for kind in static shared; do
  shared=OFF
  targets=(gradwire gradwire_cuda)
  if [[ $kind == shared ]]; then
    shared=ON
    targets=(gradwire_shared gradwire_cuda_shared)
  fi
  prefix=$PWD/build/install-prefix/cuda-$kind
  example=$PWD/build/install-cuda-example/$kind
  rm -rf "$prefix" "$example"
  cmake -B build/cuda -DBUILD_SHARED_LIBS="$shared"
  cmake --build build/cuda --target "${targets[@]}"
  cmake --install build/cuda --prefix "$prefix"
  cmake -S examples/cuda -B "$example" -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
  cmake --build "$example"
  status=0
  "$example/encode" 2>"$example/errors" || status=$?
  cat "$example/errors"
  if ((status != 0)) && ! grep -q 'there is no GPU here' "$example/errors"; then
    echo "check_install_cuda.sh: the example ended with $status" >&2
    exit 1
  fi
done
prefix=build/install-prefix/cuda-shared
scripts/check_exports.py "$prefix/include" "$prefix"/lib/libgradwire{,_cuda}.so
[[ -z $(find "$prefix" -name '*.a') ]]
# libgradwire_cuda.so contains CUDA's runtime; a program needs no other library of CUDA.
! readelf -d "$prefix/lib/libgradwire_cuda.so" | grep -i 'NEEDED.*cuda'
