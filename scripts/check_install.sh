#!/usr/bin/env bash
# Installs the build of the preset gcc, shared and static, into build/install-prefix. Then builds
# and runs the examples in C and C++ against it: with pkg-config, with cc alone, and with CMake.
# (scripts/check_install_cuda.sh checks gradwire::cuda.)
#
# Usage: scripts/check_install.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=$PWD/build/gcc
examples=$PWD/build/install-examples
rm -rf "$PWD/build/install-prefix" "$examples"
mkdir -p "$examples"

# say WORDS...: prints the name of the next part.
say() { printf '== %s\n' "$*"; }

# install_as shared|static: installs the tested objects and sets `prefix`.
install_as() {
  local shared=ON
  [[ $1 == static ]] && shared=OFF
  say "$1"
  prefix=$PWD/build/install-prefix/$1
  export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
  cmake --preset gcc -DBUILD_SHARED_LIBS="$shared"
  cmake --build "$build" -j "$(nproc)"
  # The prefix may also be given only at installation.
  cmake --install "$build" --prefix "$prefix"
}

# compile_c NAME SOURCE FLAGS...: compiles as C99 and runs it.
compile_c() {
  local program=$examples/$1 source=$2
  shift 2
  cc -std=c99 -Wall -Wextra -Wpedantic -Werror "$source" "$@" -o "$program"
  LD_LIBRARY_PATH=$prefix/lib "$program"
}

# build_project LANGUAGE KIND: the example as a CMake project.
build_project() {
  local folder=$examples/cmake-$1-$2
  cmake -S "examples/$1" -B "$folder" -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
  cmake --build "$folder"
  "$folder/average"
}

# build_mpi KIND: a program of two ranks against the installed gradwire::mpi.
build_mpi() {
  local folder=$examples/mpi-$1
  mkdir -p "$folder"
  echo 'cmake_minimum_required(VERSION 3.16)
project(mpi_user LANGUAGES CXX)
find_package(gradwire CONFIG REQUIRED COMPONENTS mpi)
add_executable(mpi_user main.cc)
target_link_libraries(mpi_user PRIVATE gradwire::mpi)' >"$folder/CMakeLists.txt"
  echo '#include <gradwire/gradwire_mpi.h>
#include <gradwire/mpi.h>
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  float values[3] = {1, 2, 3};
  const bool cpp = gradwire::mpi::all_reduce(MPI_IN_PLACE, values, 3, gradwire::Dtype::kFloat32,
      gradwire::Reduction::kSum, MPI_COMM_WORLD, {.codec = "raw"}).ok();
  const bool c = gw_allreduce(MPI_IN_PLACE, values, 3, GW_F32, GW_SUM, MPI_COMM_WORLD, nullptr) == GW_OK;
  MPI_Finalize();
  return cpp && c ? 0 : 1;
}' >"$folder/main.cc"
  cmake -S "$folder" -B "$folder/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
  cmake --build "$folder/build"
  tests/mpi/mpirun.sh -n 2 "$folder/build/mpi_user"
}

# compile_mpi KIND: a C program of two ranks, with cc and the flags of pkg-config.
compile_mpi() {
  local program=$examples/mpi-pkg-config-$1
  echo '#include <gradwire/gradwire_mpi.h>
#include <stdio.h>
int main(int argc, char** argv) {
  float values[3] = {1, 2, 3};
  gw_mpi_options options;
  int size = 0;
  gw_status status;
  MPI_Init(&argc, &argv);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  gw_mpi_options_init(&options);
  options.codec = "raw";
  options.exchange = "hierarchical:ranks=1";
  status = gw_allreduce(MPI_IN_PLACE, values, 3, GW_F32, GW_SUM, MPI_COMM_WORLD, &options);
  if (status != GW_OK) fputs(gw_last_error_message(), stderr);
  MPI_Finalize();
  return status == GW_OK && values[2] == 3 * (float)size ? 0 : 1;
}' >"$program.c"
  # shellcheck disable=SC2046 # flags are words
  cc -std=c99 -Wall -Wextra -Wpedantic -Werror "$program.c" \
    $(pkg-config --cflags --libs gradwire_mpi) -o "$program"
  LD_LIBRARY_PATH=$prefix/lib tests/mpi/mpirun.sh -n 2 "$program"
}

install_as static
[[ -z $(find "$prefix" -name '*.so*' ! -name libgradwire_mpi_preload.so) ]]
# shellcheck disable=SC2046 # flags are words
compile_c average-static examples/c/average.c $(pkg-config --cflags --libs gradwire)
build_project cpp static
if [[ -f $prefix/lib/libgradwire_mpi.a ]]; then
  build_mpi static
  compile_mpi static
fi

install_as shared
libraries=("$prefix/lib/libgradwire.so")
[[ ! -f $prefix/lib/libgradwire_mpi.so ]] || libraries+=("$prefix/lib/libgradwire_mpi.so")
scripts/check_exports.py "$prefix/include" "${libraries[@]}"
scripts/check_hardening.py "${libraries[@]}"
readelf -d "$prefix/lib/libgradwire.so" | grep -q 'SONAME.*\[libgradwire\.so\.0\.[0-9]*\]'
[[ -z $(find "$prefix" -name '*.a' -o -name '_core*') ]]
for example in average compress; do
  # shellcheck disable=SC2046 # flags are words
  compile_c "$example-pkg-config" "examples/c/$example.c" $(pkg-config --cflags --libs gradwire)
  compile_c "$example-cc" "examples/c/$example.c" -I "$prefix/include" -L "$prefix/lib" -lgradwire
done
# shellcheck disable=SC2046 # flags are words
c++ -std=c++20 examples/cpp/average.cc $(pkg-config --cflags --libs gradwire) \
  -o "$examples/average-c++" && LD_LIBRARY_PATH=$prefix/lib "$examples/average-c++"
echo '#include <gradwire/gradwire.h>' |
  c++ -std=c++11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I "$prefix/include" -x c++ -
build_project c shared
build_project cpp shared
say "docs/guides/mpi.md, without root"
(
  unset PKG_CONFIG_PATH
  export HOME=$examples/home
  # shellcheck disable=SC2016 # backquotes of Markdown
  block=$(sed -n '/^Without root/,/^A CMake/{/^```sh/,/^```/{/^```/d;p}}' docs/guides/mpi.md)
  [[ $block == *"cmake --install build "* ]]
  cd "$examples" && mkdir -p home && ln -sfn ../../examples examples && ln -sfn "$build" build
  bash -euc "$block" | tail -n 1
)
if [[ -f $prefix/lib/libgradwire_mpi.so ]]; then
  build_mpi shared
  compile_mpi shared
  # As docs/guides/mpi.md has it.
  # shellcheck disable=SC2046 # flags are words
  mpicxx -std=c++20 -fsyntax-only examples/mpi_training.cc $(pkg-config --cflags gradwire_mpi)
fi

say another language, without a compiler: the same bytes as the Python module makes
python - "$prefix/lib/libgradwire.so" <<'PYTHON'
import ctypes
import sys

import gradwire
import numpy as np

library = ctypes.CDLL(sys.argv[1])
x = np.random.default_rng(0).standard_normal(100_001).astype(np.float32)
for info in gradwire.codecs():
    codec, size = ctypes.c_void_p(), ctypes.c_uint64()
    assert library.gw_codec_parse(info["name"].encode(), ctypes.byref(codec)) == 0
    n = ctypes.c_uint64(x.size)
    assert library.gw_max_encoded_size(codec, n, ctypes.byref(size)) == 0
    frame = ctypes.create_string_buffer(size.value)
    data = x.ctypes.data_as(ctypes.c_void_p)
    assert library.gw_encode(codec, data, n, 0, None, frame, size, ctypes.byref(size), None) == 0
    assert frame.raw[: size.value] == gradwire.encode(x, info["name"]), info["name"]
    library.gw_codec_free(codec)
PYTHON
say a version that is not there
mkdir "$examples/newer"
echo 'cmake_minimum_required(VERSION 3.16)
project(newer LANGUAGES CXX)
find_package(gradwire 99.0 CONFIG)
if(gradwire_FOUND)
  message(FATAL_ERROR "gradwire 99.0 was found")
endif()' >"$examples/newer/CMakeLists.txt"
cmake -S "$examples/newer" -B "$examples/newer/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix"

say components that are not there
# refused_component NAME REASON ARGUMENTS...: CMake gives the reason.
refused_component() {
  local folder=$examples/component-$1 said
  mkdir -p "$folder"
  echo "cmake_minimum_required(VERSION 3.16)
project(user LANGUAGES CXX)
find_package(gradwire CONFIG REQUIRED COMPONENTS $1)" >"$folder/CMakeLists.txt"
  rm -rf "$folder/build"
  ! said=$(cmake -S "$folder" -B "$folder/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" "${@:3}" \
    2>&1) || { echo "component $1 was found" >&2 && return 1; }
  [[ $(tr -s ' \n' ' ' <<<"$said") == *"component $1: $2"* ]] || { echo "$said" >&2 && return 1; }
}
refused_component cuda "this gradwire was built without CUDA, so build it with -DGRADWIRE_CUDA=ON"
refused_component mpl "there are mpi and cuda alone"
if [[ -f $prefix/lib/libgradwire_mpi.so ]]; then
  refused_component mpi "CMake found no MPI here" -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON
else
  refused_component mpi "this gradwire was built without MPI, so build it with -DGRADWIRE_MPI=ON"
fi

say manual pages
for page in gradwire gw_encode gw_exchange_receive; do
  [[ -f $prefix/share/man/man3/$page.3 ]]
done
groff -man -ww -z "$prefix/share/man/man3/gradwire.3" 2>&1 | tee "$examples/groff.log"
[[ ! -s $examples/groff.log ]]
[[ ! -f $prefix/lib/libgradwire_mpi.so ]] || for page in gradwire_mpi gw_allreduce gw_wait; do
  [[ -f $prefix/share/man/man3/$page.3 ]]
done
