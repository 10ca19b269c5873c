#!/usr/bin/env bash
# Runs formatters and linters over the whole tree. Changes nothing without --fix.
#
# Usage: scripts/lint.sh [--fix] [TOOL...]
#   --fix   let clang-format and ruff rewrite what they can
#   TOOL    clang-format, ruff, mypy, imports, shellcheck, pickles, clang-tidy (default: all)
#
# clang-tidy reads build/gcc/compile_commands.json, which the preset writes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

fix=no
tools=()
while (($# > 0)); do
  case $1 in
    --fix) fix=yes ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
    clang-format | ruff | mypy | imports | shellcheck | pickles | clang-tidy) tools+=("$1") ;;
    *) echo "lint.sh: unknown tool or option $1 (see --help)" >&2 && exit 2 ;;
  esac
  shift
done
((${#tools[@]} > 0)) || tools=(clang-format ruff mypy imports shellcheck pickles clang-tidy)

# Prints, each ended by NUL, the files of this repository (not what git ignores) that match $@.
list_files() {
  git ls-files -z --cached --others --exclude-standard -- "$@" |
    while IFS= read -rd '' file; do
      if [[ -f $file ]]; then printf '%s\0' "$file"; fi
    done
}

lint_clang_format() {
  local mode=(--dry-run --Werror)
  [[ $fix == yes ]] && mode=(-i)
  # The version is pinned: another one formats differently.
  [[ $(clang-format --version) == *" 14."* ]] ||
    { echo "lint.sh: needs clang-format 14, as constraints.txt says; run scripts/setup.sh" >&2 &&
      return 1; }
  list_files '*.c' '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0r -n 40 clang-format "${mode[@]}"
}

lint_ruff() {
  if [[ $fix == yes ]]; then
    ruff check --fix .
    ruff format .
  else
    ruff check .
    ruff format --check .
  fi
}

lint_mypy() {
  mypy
}

lint_imports() {
  lint-imports --no-logo --no-cache
}

lint_shellcheck() {
  { list_files '*.sh' && printf '.ci/run\0'; } | xargs -0 shellcheck -x
}

lint_pickles() {
  python scripts/check_pickles.py
}

lint_clang_tidy() {
  cmake --preset gcc > /dev/null
  # CUDA's headers may be missing, so the files that include them are left out.
  list_files 'src/*.cc' 'python/src/*.cc' ':!src/cuda/*' ':!python/src/cuda_module.cc' |
    xargs -0r -n 1 -P "$(nproc)" clang-tidy -p build/gcc --quiet --warnings-as-errors='*' \
        --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument
}

for tool in "${tools[@]}"; do
  echo "lint: $tool"
  "lint_${tool//-/_}"
done
