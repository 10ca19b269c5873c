#!/usr/bin/env bash
# Builds, tests and measures the codecs on the GPU of this machine; keeps the table of results.
# One call takes at most ten minutes: the build is only for this GPU, and the table is written
# before compute-sanitizer (if it is installed) uses the remaining time.
#
# Usage: scripts/check-gpu.sh [OPTION...] [-- CMAKE_ARGUMENT...]
#   --output FILE     write the table there (default: bench/results/cuda.txt)
#   --limit SECONDS   end by then; compute-sanitizer gets the remaining time (default: 540)
#   --arch LIST       architectures to compile for (default: native, this machine's GPU)
#   --commit NAME     the name of the sources if there is no git
#   --build-only      only build, with --arch; needs no GPU
#   --run-only        run the programs in build/gpu; needs neither compiler nor network
#   --no-python       skip the hook's tests, for which python3 must have PyTorch, nanobind, pytest
#                     and typing_extensions
#
# Exit status: 0 success; 1 a build or test failed, or there is no GPU; 3 a speed misses its target.
#
# Needs nvcc (12.0), cmake (3.25), a C++20 compiler; Highway, xxHash and GoogleTest come from the
# system (Debian: libhwy-dev libxxhash-dev libgtest-dev), else they are fetched. Without a network:
#   * build elsewhere: `check-gpu.sh --build-only --arch 90`, take the tree with build/gpu along,
#     there `check-gpu.sh --run-only`; or
#   * take their sources along (the tags are in cmake/dependencies.cmake) and say where they lie:
#       check-gpu.sh -- -DFETCHCONTENT_SOURCE_DIR_HWY=DIR -DGRADWIRE_XXHASH_INCLUDE=DIR \
#         -DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

output=bench/results/cuda.txt
limit=540
arch=native
commit=unknown
builds=yes
runs=yes
python=yes
words="scripts/check-gpu.sh $*"
while (($# > 0)); do
  case $1 in
    --output) output=${2:?--output needs a file} && shift ;;
    --limit) limit=${2:?--limit needs seconds} && shift ;;
    --arch) arch=${2:?--arch needs a list, as 90} && shift ;;
    --commit) commit=${2:?--commit needs a name} && shift ;;
    --build-only) runs=no ;;
    --run-only) builds=no ;;
    --no-python) python=no ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
    --) shift && break ;;
    *) echo "check-gpu.sh: unknown option $1 (see --help)" >&2 && exit 2 ;;
  esac
  shift
done

build=build/gpu
cuda_test=$build/tests/cuda/cuda_test
log=build/logs/check-gpu.log
fail() { echo "check-gpu.sh: $*" >&2 && exit 1; }
say() { printf '== %s s: %s\n' "$SECONDS" "$*"; }

has_gpu() { [[ -e /dev/nvidia0 || -e /dev/dxg ]] || nvidia-smi -L >/dev/null 2>&1; }
[[ $runs == no ]] || has_gpu || fail "there is no NVIDIA GPU here (no /dev/nvidia0, and nvidia-smi lists none)"
[[ $runs == yes || $arch != native ]] || fail "--build-only needs --arch, as 90"
[[ $builds == yes || -x $cuda_test ]] || fail "$cuda_test is not there; --build-only makes it"

build_programs() {
  command -v nvcc >/dev/null || PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  command -v nvcc >/dev/null || fail "there is no nvcc here, in PATH or ${CUDA_HOME:-/usr/local/cuda}/bin"
  local generator=()
  ! command -v ninja >/dev/null || [[ -f $build/CMakeCache.txt ]] || generator=(-G Ninja)
  local module=(-DGRADWIRE_PYTHON=OFF) targets=(cuda_test cuda_bench)
  if [[ $python == yes ]]; then
    module=(-DGRADWIRE_PYTHON=ON -DPython_EXECUTABLE="$(command -v python3)")
    targets+=(_core _cuda)
  fi
  {
    cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_CUDA=ON \
      -DCMAKE_CUDA_ARCHITECTURES="$arch" -DGRADWIRE_TESTS=ON -DGRADWIRE_BENCH=OFF \
      "${module[@]}" -DGRADWIRE_MPI=OFF -DGRADWIRE_INSTALL=OFF "$@" &&
      cmake --build "$build" --target "${targets[@]}" --parallel "$(nproc)"
  } >"$log" 2>&1 || {
    tail -n 60 "$log" >&2
    fail "the build failed; all of its output is in $log. Without a network see --help"
  }
  local compiler
  compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
  {
    echo "commit $(git describe --always --dirty 2>/dev/null || echo "$commit")"
    echo "$(nvcc --version | sed -n 's/.*release .*, V/nvcc /p'), architectures $arch," \
      "$("$compiler" --version | sed -n 1p)"
  } >"$build/built.txt"
  # The machine may not have it installed.
  mkdir -p "$build/lib"
  ldd "$cuda_test" | sed -n 's/.*libhwy.* => \([^ ]*\) .*/\1/p' | xargs -r cp -L -t "$build/lib"
}

# Tests the exchange and the hook on the GPU, with the modules that were built.
test_python() {
  local site=$build/site
  rm -rf "$site" && mkdir -p "$site"
  cp -r python/gradwire "$site/"
  cp "$build"/python/_core.*.so "$build"/python/_cuda.*.so "$site/gradwire/"
  PYTHONPATH=$site timeout 200 python3 -m pytest -q -p no:cacheprovider -k "gpu or Gpu" \
    tests/torch/test_device_exchange.py tests/torch/test_hook_gpu.py
}

mkdir -p build/logs "$(dirname "$output")"
if [[ $python == yes ]] && ! python3 -c 'import nanobind, numpy, pytest, torch, typing_extensions' 2>/dev/null; then
  say "the hook is not tested: python3 lacks PyTorch, nanobind, pytest or typing_extensions"
  python=no
fi
if [[ $builds == yes ]]; then
  say "building in $build (log: $log)"
  build_programs "$@"
fi
if [[ $runs == no ]]; then
  say "built; on a machine with the GPU: scripts/check-gpu.sh --run-only"
  exit 0
fi

say "cuda_test"
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
status=0
"$cuda_test" --gtest_brief=1 || status=$?
((status != 77)) || fail "CUDA finds no GPU that it can use here"
((status == 0)) || fail "the codecs on the GPU are not right (cuda_test ended with $status); nothing was measured"

if [[ $python == yes ]]; then
  say "the hook, in PyTorch"
  test_python || fail "the hook is not right on this GPU; nothing was measured"
fi

say "cuda_bench"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
{
  echo "# $words, $(date -u +%F); driver ${driver:-unknown}"
  sed 's/^/# /' "$build/built.txt"
  echo "# cuda_test: every test passed; the hook in PyTorch: $([[ $python == yes ]] && echo too || echo not tested)"
  "$build/bench/cuda/cuda_bench"
} | tee "$output.part"
mv "$output.part" "$output"

# sanitize TOOL SECONDS: runs the short tests under the tool and prints one line about its findings.
sanitize() {
  local status=0 log=build/logs/compute-sanitizer-$1.log
  timeout -k 10 "$2" compute-sanitizer --tool "$1" --error-exitcode 9 "$cuda_test" \
    --gtest_brief=1 --gtest_filter='*SendsNothingWhereNothingIs*:*TakesManySegments*' \
    >"$log" 2>&1 || status=$?
  case $status in
    0) echo "compute-sanitizer $1: nothing found" ;;
    124 | 137) echo "compute-sanitizer $1: stopped after $2 s, $(grep '^=========' "$log" | grep -vc COMPUTE-SANITIZER || true) lines said until then ($log)" ;;
    *) echo "compute-sanitizer $1: FAILED with $status: $(grep '^=========' "$log" | sed -n 2p) ($log)" ;;
  esac
}

PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
if command -v compute-sanitizer >/dev/null; then
  tools=(memcheck racecheck synccheck)
  for i in "${!tools[@]}"; do
    share=$(((limit - SECONDS) / (${#tools[@]} - i)))
    if ((share < 10)); then
      echo "compute-sanitizer ${tools[i]}: not run, no time left"
    else
      sanitize "${tools[i]}" "$share"
    fi
  done | sed -u 's/^/# /' | tee -a "$output"
else
  echo "# compute-sanitizer: not run, there is none here" | tee -a "$output"
fi

short=$(grep -c ' short$' "$output" || true)
say "kept in $output; targets reached: $(grep -c ' pass$' "$output" || true), short: $short"
! grep -q '^# compute-sanitizer.*FAILED' "$output" || fail "compute-sanitizer found something"
((short == 0)) || exit 3
