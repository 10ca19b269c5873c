#!/usr/bin/env bash
# Prepares this checkout: installs system packages, creates .venv with the versions of
# constraints.txt, and builds and installs gradwire and gradwire-lab into it. The installations are
# editable: changes of Python files take effect at once, changes of C++ when this script has run
# again. Finished steps are skipped; without changes the script takes a second or two.
#
# As root on Debian it installs missing packages. Without root it names them and stops.
#
# Usage: scripts/setup.sh [--demo] [--python PATH] [--torch-index URL]
#   --demo             install only the packages for the build and the demo, no developer tools
#   --python PATH      interpreter for a new .venv (default: the first of python3, python3.14 ..
#                      python3.11, /usr/bin/python3 with version >= 3.11, venv and headers)
#   --torch-index URL  package index for PyTorch (default: pip's own sources if they have the CPU
#                      build, else https://download.pytorch.org/whl/cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/progress.sh
source scripts/progress.sh

build_packages=(g++ ccache libhwy-dev libxxhash-dev)
demo_packages=(dataset-fashion-mnist iproute2 util-linux)
developer_packages=(
  clang clang-tidy git groff-base libbenchmark-dev libclang-rt-dev libgtest-dev libopenmpi-dev make
  openmpi-bin pkgconf shellcheck verilator yosys zlib1g-dev
)
python_packages=(python3 python3-dev python3-venv)

packages=("${build_packages[@]}" "${demo_packages[@]}" "${developer_packages[@]}")
logs=build/logs
requirements=constraints.txt
wanted_python=""
torch_index=""
while (($# > 0)); do
  case $1 in
    --demo)
      packages=("${build_packages[@]}" "${demo_packages[@]}")
      requirements=$logs/demo-packages.txt
      mkdir -p "$logs"
      sed '/^# Tools for developers/,$d' constraints.txt >"$requirements"
      ;;
    --python) wanted_python=${2:?--python needs a path} && shift ;;
    --torch-index) torch_index=${2:?--torch-index needs a URL} && shift ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
    *) echo "setup.sh: unknown option $1 (see --help)" >&2 && exit 2 ;;
  esac
  shift
done

start=${EPOCHREALTIME/[.,]/}
venv=.venv

is_suitable_python() {
  command -v "$1" >/dev/null && "$1" - 2>/dev/null <<'PYTHON'
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= (3, 11)
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
PYTHON
}

# Prints the interpreter for a new environment, or nothing if there is none.
find_python() {
  local candidate
  for candidate in ${wanted_python:-python3 python3.14 python3.13 python3.12 python3.11 \
    /usr/bin/python3}; do
    if is_suitable_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
}

install_system_packages() {
  if ! command -v dpkg-query >/dev/null; then
    echo "  not a Debian system; it must have the contents of: ${packages[*]}"
    return
  fi
  local missing
  missing=$(scripts/install_packages.sh --list "${packages[@]}")
  [[ -n $missing ]] || return 0
  run_step "installing $missing" "$logs/apt-install.log" \
    scripts/install_packages.sh "${packages[@]}"
}

create_environment() {
  "$venv/bin/python" -c 'import pip' 2>/dev/null && return
  local python
  python=$(find_python)
  if [[ -z $python ]]; then
    echo "setup.sh: no ${wanted_python:-Python} of version 3.11 or newer with venv and headers" \
      "(on Debian: ${python_packages[*]})" >&2
    exit 1
  fi
  run_step "virtual environment of $python" "$logs/venv.log" "$python" -m venv --clear "$venv"
}

# Prints the names in $requirements that are not installed in that version. A local suffix
# (2.13.0+cpu) does not matter.
list_outdated() {
  "$venv/bin/python" - "$requirements" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1], encoding="utf-8"):
    name, _, wanted = line.partition("#")[0].strip().partition("==")
    try:
        found = version(name) if name else ""
    except PackageNotFoundError:
        found = "none"
    if found.partition("+")[0] != wanted:
        print(name)
PYTHON
}

# PyPI's PyTorch for x86-64 Linux brings gigabytes of CUDA libraries, so it is installed alone,
# first, exactly as pinned, and from an index with the CPU build.
install_torch() {
  local pin offered index=()
  pin=$(grep -E '^torch==' constraints.txt)
  if [[ -n $torch_index ]]; then
    index=(--extra-index-url "$torch_index")
  else
    offered=$("$venv/bin/python" -m pip index versions torch 2>/dev/null || true)
    [[ $offered == *"${pin#torch==}+cpu"* ]] ||
      index=(--extra-index-url https://download.pytorch.org/whl/cpu)
  fi
  run_step "$pin${index[1]:+ from ${index[1]}} (some 200 MB)" "$logs/pip-torch.log" \
    "${pip[@]}" "${index[@]}" -c constraints.txt "$pin"
}

install_python_packages() {
  local outdated
  outdated=$(list_outdated)
  [[ -z $outdated ]] && return
  if grep -qx torch <<<"$outdated"; then
    install_torch
  fi
  run_step "$(wc -l <<<"$outdated") packages of constraints.txt" "$logs/pip-packages.log" \
    "${pip[@]}" -r "$requirements"
}

# Prints a digest of everything that the module depends on: sources, folder, interpreter.
digest_sources() {
  local path paths=()
  for path in CMakeLists.txt cmake include man src python/CMakeLists.txt python/src pyproject.toml \
    constraints.txt; do
    [[ -e $path ]] && paths+=("$path")
  done
  {
    pwd
    "$venv/bin/python" -VV
    find "${paths[@]}" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    find python/gradwire -name '*.py' | LC_ALL=C sort
  } | sha256sum
}

install_gradwire() {
  local stamp=$venv/.gradwire-built digest
  digest=$(digest_sources)
  if [[ -f $stamp && $(<"$stamp") == "$digest" && -f python/gradwire/_core.pyi ]] &&
    "$venv/bin/python" -c 'import gradwire._core' 2>/dev/null; then
    return
  fi
  rm -f "$stamp"
  run_step "building and installing gradwire" "$logs/pip-gradwire.log" \
    "${pip[@]}" -v --no-build-isolation --no-deps --editable .
  "$venv/bin/python" -c 'import gradwire._core'
  # mypy looks for the module's types beside the package's Python files.
  cp "$venv"/lib/python3*/site-packages/gradwire/_core.pyi python/gradwire/
  echo "$digest" >"$stamp"
}

# A link to lab/, in which files may come and go; only its commands are written down.
install_lab() {
  local stamp=$venv/.gradwire-lab-installed digest
  digest=$(pwd && sha256sum lab/pyproject.toml)
  [[ ! -f $stamp || $(<"$stamp") != "$digest" ]] || return 0
  run_step "installing gradwire-lab" "$logs/pip-gradwire-lab.log" \
    "${pip[@]}" --no-build-isolation --no-deps --editable ./lab
  echo "$digest" >"$stamp"
}

echo "setup: $(pwd)"
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null && [[ -z $(find_python) ]]; then
  packages+=("${python_packages[@]}")
fi
install_system_packages
create_environment
# The build takes cmake, ninja and nanobind from the environment.
PATH="$PWD/$venv/bin:$PATH"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off)
install_python_packages
install_gradwire
install_lab
read_clock "$start"
echo "setup: ready after $clock s; commands are in $venv/bin"
