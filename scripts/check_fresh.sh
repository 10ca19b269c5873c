#!/usr/bin/env bash
# Does what a newcomer does: clones the committed state into an empty folder and runs, in order,
# the commands of the README's ```sh blocks that start with scripts/ or .venv/bin/. Nothing that
# is built or installed in this checkout is used. The folder is removed unless a command fails.
#
# Usage: scripts/check_fresh.sh [--list] [--keep] [REVISION]
#   --list    print the commands and run none
#   --keep    do not remove the clone
#   REVISION  what to check out (default: HEAD)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/progress.sh
source scripts/progress.sh

# Prints the commands of the README given as input.
list_commands() {
  awk '/^```/ { inside = !inside && /^```(sh|bash)$/; next }
       inside && /^(scripts|\.venv\/bin)\// { sub(/[ \t]+#.*$/, ""); print }'
}

list_only=no
keep=no
revision=HEAD
for argument in "$@"; do
  case $argument in
    --list) list_only=yes ;;
    --keep) keep=yes ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
    -*) echo "check_fresh.sh: unknown option $argument (see --help)" >&2 && exit 2 ;;
    *) revision=$argument ;;
  esac
done

commit=$(git rev-parse --verify "$revision^{commit}")
mapfile -t commands < <(git show "$commit:README.md" | list_commands)
if ((${#commands[@]} == 0)); then
  echo "check_fresh.sh: the README of $revision has no command to run" >&2
  exit 1
fi
if [[ $list_only == yes ]]; then
  printf '%s\n' "${commands[@]}"
  exit 0
fi
[[ -z $(git status --porcelain) ]] ||
  echo "  note: this checkout has changes that are not committed; they are not checked"

# The clone must not use the environment that this script was started in.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME CC CXX CFLAGS CXXFLAGS LDFLAGS
PATH=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$PWD/.venv/bin" | paste -sd :)

clone=$(mktemp -d -t gradwire-fresh-XXXXXX)
start=${EPOCHREALTIME/[.,]/}
git clone --quiet --no-hardlinks . "$clone/gradwire"
git -C "$clone/gradwire" -c advice.detachedHead=false checkout --quiet "$commit"
cd "$clone/gradwire"
echo "check_fresh: $(git log -1 --format='%h %s') in $clone/gradwire"
for command in "${commands[@]}"; do
  printf '\n$ %s\n' "$command"
  command_start=${EPOCHREALTIME/[.,]/}
  if ! bash -c "$command" </dev/null; then
    echo "check_fresh: FAILED: $command (the clone is left in $clone/gradwire)"
    exit 1
  fi
  read_clock "$command_start"
  printf '(%s s)\n' "$clock"
  left=$(git status --porcelain)
  if [[ -n $left ]]; then
    printf 'check_fresh: FAILED: after it git sees files that are not ignored:\n%s\n' "$left"
    exit 1
  fi
done
cd /
if [[ $keep == yes ]]; then
  echo "the clone is left in $clone/gradwire"
else
  rm -rf "$clone"
fi
read_clock "$start"
printf '\ncheck_fresh: ok after %s s\n' "$clock"
