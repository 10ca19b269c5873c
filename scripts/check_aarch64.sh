#!/usr/bin/env bash
# Cross-builds the library, tests and the Python module for 64-bit Arm and runs, in qemu-user, the
# tests that compare the SIMD targets with scalar code, and the golden files. Each runs on emulated
# CPUs whose SVE vectors have 128, 256 and 512 bits, because Highway has targets for these lengths:
# sve2_128, sve_256, and sve and sve2 of any length. All have NEON. A CPU for which no target of SVE
# is found is an error: its tests would be those of NEON.
#
# As root on Debian it installs the cross compiler and qemu-user.
#
# Usage: scripts/check_aarch64.sh [--build-only]
#   --build-only  build the Python module and run nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
PATH="$root/.venv/bin:$PATH"
build=$root/build/aarch64
programs=(stages_test base_test frame_test codecs_test feedback_test)

scripts/install_packages.sh g++-aarch64-linux-gnu qemu-user

# Files that did not change keep their time, so that nothing is built again.
stamp=$root/build/third_party/third_party.json
if ! cmp -s cmake/third_party.json "$stamp"; then
  scripts/vendor.py build/third_party
  cp cmake/third_party.json "$stamp"
fi
cmake --preset aarch64
if [[ ${1-} == --build-only ]]; then
  cmake --build "$build" -j "$(nproc)" --target _core
  exit
fi
cmake --build "$build" -j "$(nproc)" --target _core "${programs[@]}"

arm=(qemu-aarch64 -L /usr/aarch64-linux-gnu)

# The SIMD targets of the emulated CPU, one a line: each test of a kernel runs once for each.
list_targets() {
  "${arm[@]}" "$build/tests/stages_test" --gtest_list_tests |
    sed -n 's|^  [^/ ]*/\([a-z0-9_]*\)\(  *#.*\)\{0,1\}$|\1|p' | sort -u
}

# A cpu's `max` has vectors of sve-max-vq times 128 bits.
for vq in 1 2 4; do
  export QEMU_CPU=max,sve-max-vq=$vq
  targets=$(list_targets)
  printf '== SVE vectors of %d bits: targets %s\n' $((128 * vq)) "${targets//$'\n'/ }"
  if ! grep -q '^sve' <<<"$targets"; then
    echo "check_aarch64.sh: no target uses SVE vectors of $((128 * vq)) bits" >&2
    exit 1
  fi
  for program in "${programs[@]}"; do
    printf '== %s, SVE vectors of %d bits: ' "$program" $((128 * vq))
    # qemu-user aborts in a child that is forked while other threads run.
    "${arm[@]}" "$build/tests/$program" --gtest_brief=1 \
      --gtest_filter='-*Forked*' | tail -n 3
  done
done

arm_python=build/python-aarch64-3.11
scripts/debian_python.sh "$arm_python" aarch64 bookworm 3.11
site=$root/build/arm-site
tags=()
for tag in 17 26 27 28; do tags+=(--platform "manylinux_2_${tag}_aarch64"); done
rm -rf "$site"
python -m pip install -q --target "$site" --only-binary :all: --python-version 3.11 \
  --implementation cp --abi cp311 --abi abi3 --abi none "${tags[@]}" \
  --platform manylinux2014_aarch64 -c constraints.txt \
  numpy typer rich nanobind-backend pytest xxhash
cp -r python/gradwire "$site/"
rm -f "$site"/gradwire/_core*.so
cp "$build/python/_core.abi3.so" "$site/gradwire/"
for vq in 1 2 4; do
  printf '== golden files, SVE vectors of %d bits\n' $((128 * vq))
  QEMU_CPU=max,sve-max-vq=$vq PYTHONPATH=$site:$root/tests/python "$arm_python/python" -P \
    -m pytest -q -p no:cacheprovider --noconftest tests/python/test_golden.py
done
