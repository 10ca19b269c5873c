#!/usr/bin/env bash
# Runs everything that must pass before a change is merged, from set-up to the last test. Stops at
# the first stage that fails and prints its log. Ends with the seconds of each stage. Needs no
# terminal.
#
# Usage: scripts/test.sh [--list] [--verbose] [STAGE...]
#   STAGE      run these only, in the order given (default: all but those marked "on request")
#   --verbose  show a stage's output while it runs
#   --list     print the stages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/progress.sh
source scripts/progress.sh

stages=(
  "setup     system packages, Python packages, gradwire itself (scripts/setup.sh)"
  "includes  each layer includes only earlier layers (scripts/check_includes.py)"
  "gcc       build with g++ as users do, warnings are errors; ctest"
  "lint      formatters and linters (scripts/lint.sh)"
  "asan      build with clang++, AddressSanitizer and UndefinedBehaviorSanitizer, warnings are errors, fuzzers too; ctest"
  "fuzz      each fuzzer for a minute (scripts/fuzz.sh)"
  "cuda      build with nvcc for sm_90; cuda_test, which needs a GPU; install"
  "install   cmake --install of the gcc build, shared and static; the examples against it"
  "wheel     the built packages alone, in an environment without PyTorch"
  "rtl       the engine in hardware: lint, and Verilator against the C++ codec"
  "site      the documentation site; every warning is an error (scripts/docs.sh)"
  "pytest    the Python tests"
)
on_request=(
  "clang     build with clang++ without sanitizers, warnings are errors; ctest"
  "tsan      ThreadSanitizer; ctest"
  "asan_py   the Python tests with a module that has the sanitizers of asan"
  "asan_mpi  the MPI engine and its tests with the sanitizers of asan"
  "tsan_py   the hook, ShardedOptimizer, LocalSteps and servers with a module that has ThreadSanitizer"
  "valgrind  the golden files in Valgrind"
  "long      the Python tests that take long, which pytest leaves out"
  "limits    a tensor of 2^31 + 7 values, 64 ranks (tests/limits), 20 GiB of memory; 10,000 steps of error feedback (bench/error_feedback.py)"
  "mpich     the MPI engine and its tests with MPICH; the other stages have Open MPI"
  "cuda_all  as cuda, for sm_80, sm_90, sm_100"
  "torches   tests/torch and tests/weights with other versions of PyTorch (TORCH_VERSIONS), gigabytes each"
  "recipes   installs Lightning, transformers, Ray, Flower, FLARE and others; examples/recipes runs"
  "aarch64   cross-built for 64-bit Arm; tests of the kernels and golden files with NEON and SVE, in qemu-user"
  "oss_fuzz  the fuzzers as OSS-Fuzz builds them (fuzz/oss-fuzz), run over their seeds"
  "debian    Debian packages, checked by lintian and used (scripts/debian.sh)"
  "release   what a release consists of, each part checked in an empty environment (scripts/release.sh)"
)

venv=$PWD/.venv

build_and_ctest() {
  cmake --preset "$1"
  cmake --build --preset "$1" -j "$(nproc)"
  ctest --preset "$1" -j "$(nproc)"
}

# The same -Werror as in the stage gcc lets ccache serve both.
stage_setup() { SKBUILD_CMAKE_DEFINE=GRADWIRE_WERROR=ON scripts/setup.sh; }
stage_includes() { scripts/check_includes.py; }
stage_gcc() { build_and_ctest gcc; }
stage_lint() { scripts/lint.sh; }
stage_asan() { build_and_ctest asan; }
stage_fuzz() { scripts/fuzz.sh; }
# What OSS-Fuzz's image sets, and what it runs afterwards.
stage_oss_fuzz() {
  local build=$PWD/build/oss-fuzz
  rm -rf "$build"
  mkdir -p "$build"/{src,work,out}
  git ls-files -z --cached --others --exclude-standard | tar --null -T - -c |
    tar -x -C "$build/src" --one-top-level=gradwire
  python3 scripts/vendor.py "$build/src/gradwire/third_party"
  local flags="-O1 -g1 -fsanitize=address,fuzzer-no-link"
  SRC=$build/src WORK=$build/work OUT=$build/out CC=clang CXX=clang++ CFLAGS=$flags \
    CXXFLAGS=$flags LIB_FUZZING_ENGINE=-fsanitize=fuzzer fuzz/oss-fuzz/build.sh
  local fuzzer
  for fuzzer in "$build"/out/fuzz_*[!p]; do
    mkdir "$fuzzer-seeds"
    python3 -m zipfile -e "${fuzzer}_seed_corpus.zip" "$fuzzer-seeds"
    "$fuzzer" -runs=0 "$fuzzer-seeds"
  done
}
stage_clang() { build_and_ctest clang; }
stage_cuda() { build_cuda 90-real; }
stage_cuda_all() { build_cuda '80-real;90-real;100'; }
# Lines that begin with `note:` are shown in the terminal too.
build_cuda() {
  command -v nvcc >/dev/null || PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  if ! command -v nvcc >/dev/null; then
    echo "note: there is no nvcc here; the codecs on the GPU were not compiled"
    return
  fi
  cmake --preset cuda -DCMAKE_CUDA_ARCHITECTURES="$1"
  cmake --build --preset cuda -j "$(nproc)"
  local status=0
  build/cuda/tests/cuda/cuda_test || status=$?
  case $status in
    0) ;;
    77) echo "note: there is no GPU here; the codecs on the GPU were compiled, but not run" ;;
    *) return "$status" ;;
  esac
  scripts/check_install_cuda.sh
}
stage_install() { scripts/check_install.sh; }
stage_rtl() {
  scripts/setup.sh # the tests compare with the module of the current sources
  make -C rtl
}
stage_mpich() {
  scripts/install_packages.sh mpich libmpich-dev
  build_and_ctest mpich
}
stage_asan_mpi() { build_and_ctest asan_mpi; }
stage_tsan() { build_and_ctest tsan; }
stage_pytest() {
  scripts/setup.sh # the module must be built from the current sources
  # Tests of buckets on a GPU run the kernels on the host.
  cmake --preset gcc
  cmake --build --preset gcc --target _cuda_on_host -j "$(nproc)"
  # Three processes share the files in order, because the tests wait for ranks half of the time.
  "$venv/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 tests lab/tests
}

stage_valgrind() {
  scripts/install_packages.sh valgrind
  scripts/setup.sh
  PYTHONMALLOC=malloc valgrind -q --error-exitcode=9 --suppressions=tests/python/valgrind.supp \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python/test_golden.py
}

stage_long() {
  scripts/setup.sh
  "$venv/bin/python" -m pytest -m long --durations=10 tests lab/tests
}

stage_limits() {
  scripts/setup.sh
  GRADWIRE_LIMITS=1 "$venv/bin/python" -m pytest -s --durations=0 tests/limits
  "$venv/bin/python" bench/error_feedback.py --json build/error_feedback.json
}

# Builds the Python module of a preset, and makes build/PRESET/venv, whose gradwire has it.
make_venv_of() {
  scripts/setup.sh
  cmake --preset "$1"
  cmake --build --preset "$1" -j "$(nproc)"
  local folder=build/$1/venv here
  rm -rf "$folder"
  scripts/overlay_venv.sh --own-gradwire "$folder"
  here=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp -r python/gradwire "$here/"
  ln -sfn "$PWD/lab/gradwire_lab" "$here/gradwire_lab"
  cp -r "$venv"/lib/python3*/site-packages/gradwire_lab-*.dist-info "$here/"
  cp "build/$1/python/_core.abi3.so" "$here/gradwire/"
  sed "1s|.*|#!$PWD/$folder/bin/python|" "$venv/bin/gradwire" >"$folder/bin/gradwire"
  chmod +x "$folder/bin/gradwire"
}

stage_asan_py() {
  make_venv_of asan_python
  local build=$PWD/build/asan_python
  # PyTorch keeps memory until the process ends, which is no leak.
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    GRADWIRE_ON_HOST_MODULE=$build/cuda_on_host PATH=$build/venv/bin:$PATH \
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    "$build/venv/bin/python" -m pytest -m "not long and not without_sanitizers" -n 2 \
    --dist loadfile --no-loadscope-reorder --durations=10 tests/python tests/torch lab/tests
}

# Ranks that communicate in threads of their own. PyTorch is not built with ThreadSanitizer, which
# reports what it does not see of PyTorch's locks; a report counts if a frame is in our module.
stage_tsan_py() {
  make_venv_of tsan_python
  local build=$PWD/build/tsan_python
  rm -f "$build"/report.*
  TSAN_OPTIONS="exitcode=0 die_after_fork=0 detect_deadlocks=0 report_mutex_bugs=0 log_path=$build/report" \
    PATH=$build/venv/bin:$PATH LD_PRELOAD="$(g++ -print-file-name=libtsan.so)" \
    "$build/venv/bin/python" -m pytest --durations=10 tests/torch/test_hook_overlap.py \
    tests/torch/test_sharded_optimizer.py tests/torch/test_server.py tests/torch/test_local_steps.py
  awk 'BEGIN { RS = "==================" } /_core\.abi3/ { print; found = 1 } END { exit found }' \
    /dev/null "$build"/report.*
}

# By default the oldest version that pyproject.toml takes, and the newest there is. They come with
# their CUDA libraries, where PyPI has no others.
stage_torches() {
  scripts/setup.sh
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input) version environment
  local oldest newest
  oldest=$(sed -n 's/^torch = \["torch>=\(.*\)"\]$/\1/p' pyproject.toml)
  newest=$("${pip[@]}" index versions torch 2>/dev/null | sed -n 's/^torch (\(.*\))$/\1/p')
  for version in ${TORCH_VERSIONS:-$oldest $newest}; do
    environment=build/torch-$version
    scripts/overlay_venv.sh "$environment"
    "${pip[@]}" --python "$environment" install -q "torch==$version"
    "$environment/bin/python" -c 'import torch; print("note: PyTorch", torch.__version__)'
    "$environment/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
      --durations=10 tests/torch tests/weights
  done
}

# The frameworks get an environment of their own, which sees .venv: that keeps its versions.
stage_recipes() {
  scripts/setup.sh
  local environment=build/recipes/venv
  scripts/overlay_venv.sh "$environment" constraints-recipes.txt
  HF_HUB_OFFLINE=1 RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 \
    "$environment/bin/python" -m pytest -s --durations=0 tests/recipes
}

# The wheels must work without the source tree and without PyTorch.
stage_wheel() {
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
  rm -rf build/wheel
  "${pip[@]}" wheel -q --no-build-isolation --no-deps --wheel-dir build/wheel .
  "$venv/bin/python" -m venv --without-pip build/wheel/venv
  "${pip[@]}" wheel -q --no-build-isolation --no-deps --wheel-dir build/wheel ./lab
  "${pip[@]}" --python build/wheel/venv install -q -c constraints.txt build/wheel/gradwire-*.whl
  cd build/wheel
  venv/bin/python -P ../../scripts/check_package.py
  ../../scripts/check_hardening.py venv/lib/python3*/site-packages/gradwire/_core*.so
  venv/bin/gradwire codecs --json
  "${pip[@]}" --python venv install -q -c ../../constraints.txt gradwire_lab-*.whl
  venv/bin/python -P ../../scripts/check_package.py --lab
}
stage_site() {
  scripts/setup.sh
  scripts/docs.sh
}
stage_aarch64() { scripts/check_aarch64.sh; }
stage_debian() {
  scripts/setup.sh
  scripts/debian.sh
}
stage_release() { scripts/release.sh; }

chosen=()
verbose=no
while (($# > 0)); do
  case $1 in
    --list)
      printf '%s\n' "${stages[@]}"
      printf '%s (on request)\n' "${on_request[@]}"
      exit 0
      ;;
    --verbose) verbose=yes ;;
    --inline) # a stage runs in a shell of its own, so that errexit holds in it
      PATH="$venv/bin:$PATH"
      "stage_${2:?}"
      exit 0
      ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
    *)
      if [[ $1 == -* || $(type -t "stage_$1") != function ]]; then
        echo "test.sh: unknown stage or option $1 (see --list, --help)" >&2
        exit 2
      fi
      chosen+=("$1")
      ;;
  esac
  shift
done
((${#chosen[@]} > 0)) || mapfile -t chosen < <(printf '%s\n' "${stages[@]%% *}")

summary=()
start=${EPOCHREALTIME/[.,]/}
finish() {
  local verdict=$1
  read_clock "$start"
  printf '\n' && printf '%s\n' "${summary[@]}"
  printf '%-10s %7s s   %s\n' "all" "$clock" "$verdict"
}
for stage in "${chosen[@]}"; do
  status=0
  if [[ $verbose == yes ]]; then
    stage_start=${EPOCHREALTIME/[.,]/}
    printf '  --> %s\n' "$stage"
    "$0" --inline "$stage" </dev/null || status=$?
    read_clock "$stage_start"
  else
    run_step "$stage" "build/logs/test-$stage.log" "$0" --inline "$stage" || status=$?
    sed -n 's/^note: /      /p' "build/logs/test-$stage.log"
  fi
  if ((status != 0)); then
    summary+=("$(printf '%-10s %7s s   FAILED' "$stage" "$clock")")
    finish "FAILED in stage $stage"
    exit 1
  fi
  summary+=("$(printf '%-10s %7s s   ok' "$stage" "$clock")")
done
finish ok
