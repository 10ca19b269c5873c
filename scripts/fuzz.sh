#!/usr/bin/env bash
# Runs the fuzzers, one on each core (fuzz/README.md). Inputs that reach new code stay in
# build/fuzz/NAME, and the next run begins with them. Ends with 1 if an input broke a promise, and
# names it.
#
# Usage: scripts/fuzz.sh [--seconds N] [--keep] [--coverage] [NAME...]
#   NAME         run these only (default: all): decode_frame, decode_packet, round_trip, apply_delta,
#                round_trip_delta, texts, exchange_messages, c_api, tensor_files
#   --seconds N  time of each (default: 60)
#   --keep       afterwards write few inputs that reach as much to fuzz/corpus/NAME.zip
#   --coverage   run nothing; print how much of src/ the seeds and inputs reach
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/progress.sh
source scripts/progress.sh

cpp=(decode_frame decode_packet round_trip apply_delta round_trip_delta texts exchange_messages c_api)
names=()
seconds=60
keep=no
coverage=no
while (($# > 0)); do
  case $1 in
    --seconds) seconds=${2:?--seconds needs a number} && shift ;;
    --keep) keep=yes ;;
    --coverage) coverage=yes ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
    -*) echo "fuzz.sh: unknown option $1 (see --help)" >&2 && exit 2 ;;
    *)
      if [[ " ${cpp[*]} tensor_files " != *" $1 "* ]]; then
        echo "fuzz.sh: there is no fuzzer $1 (see --help)" >&2
        exit 2
      fi
      names+=("$1")
      ;;
  esac
  shift
done
((${#names[@]} > 0)) || names=("${cpp[@]}" tensor_files)
venv=$PWD/.venv
work=$PWD/build/fuzz
mkdir -p "$work"

if [[ $coverage == yes ]]; then
  cmake --preset coverage >/dev/null
  run_step build build/logs/fuzz-coverage.log cmake --build --preset coverage -j "$(nproc)"
  objects=()
  for name in "${cpp[@]}"; do
    mkdir -p "$work/$name"
    LLVM_PROFILE_FILE=$work/$name.profraw build/coverage/fuzz/replay_"$name" \
      build/coverage/fuzz/corpus/"$name" "$work/$name" >/dev/null 2>&1
    objects+=("-object=build/coverage/fuzz/replay_$name")
  done
  llvm-profdata merge -sparse "$work"/*.profraw -o "$work/all.profdata"
  llvm-cov report "${objects[0]#-object=}" "${objects[@]:1}" -instr-profile="$work/all.profdata" \
    -ignore-filename-regex='(^/usr|/fuzz/|-inl\.h$|src/(engines|cuda)/)' "$PWD/src" "$PWD/include"
  exit
fi

cmake --preset asan >/dev/null
run_step build build/logs/fuzz-build.log cmake --build --preset asan -j "$(nproc)" \
  --target fuzz_corpus fuzzers
if [[ " ${names[*]} " == *" tensor_files "* ]] &&
  ! scripts/overlay_venv.sh "$work/venv" constraints-fuzz.txt; then
  echo "note: atheris can't be installed here; the readers of files were not fuzzed"
  mapfile -t names < <(printf '%s\n' "${names[@]}" | grep -vx tensor_files)
fi

# The command of a fuzzer, without options.
command_of() {
  if [[ $1 == tensor_files ]]; then
    fuzzer=("$work/venv/bin/python" fuzz/tensor_files.py)
  else
    fuzzer=("build/asan/fuzz/fuzz_$1")
  fi
}

run() {
  local name=$1 fuzzer
  command_of "$name"
  mkdir -p "$work/$name" "$work/crashes/$name"
  local status=0
  "${fuzzer[@]}" "$work/$name" build/asan/fuzz/corpus/"$name" -max_total_time="$seconds" \
    -max_len=4096 -timeout=30 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix="$work/crashes/$name/" >"$work/$name.log" 2>&1 </dev/null || status=$?
  local executions found
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p;s/^Done \([0-9]*\) runs.*/\1/p' \
    "$work/$name.log" | tail -n 1)
  found=$(find "$work/$name" -type f | wc -l)
  printf '%-18s %10s executions   %6s inputs kept   %s\n' "$name" "${executions:-0}" "$found" \
    "$( ((status == 0)) && echo ok || echo "FAILED: see $work/$name.log")"
  return "$status"
}

failed=0
running=0
for name in "${names[@]}"; do
  if ((running == $(nproc))); then
    wait -n || failed=1
    running=$((running - 1))
  fi
  run "$name" &
  running=$((running + 1))
done
for ((; running > 0; --running)); do wait -n || failed=1; done

if [[ $keep == yes ]]; then
  for name in "${names[@]}"; do
    command_of "$name"
    rm -rf "$work/smallest"
    mkdir "$work/smallest"
    if [[ $name == tensor_files ]]; then # its seeds are few
      cp build/asan/fuzz/corpus/"$name"/* "$work/$name"/* "$work/smallest"
    else
      "${fuzzer[@]}" -set_cover_merge=1 "$work/smallest" "$work/$name" \
        build/asan/fuzz/corpus/"$name" >"$work/$name-merge.log" 2>&1
    fi
    mkdir -p fuzz/corpus
    # A round trip takes a tenth of a second, and the tests of every build replay all inputs.
    most=100000
    [[ $name != round_trip ]] || most=150
    # The same bytes for the same inputs.
    "$venv/bin/python" - "$work/smallest" "fuzz/corpus/$name.zip" "$most" <<'PYTHON'
import pathlib, sys, zipfile

folder, target = map(pathlib.Path, sys.argv[1:3])
paths = sorted(folder.iterdir())
kept = paths[:: -(-len(paths) // int(sys.argv[3])) or 1]
with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
    for path in kept:
        archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
PYTHON
    printf '%-18s %s inputs reach as much; fuzz/corpus/%s.zip\n' "$name" \
      "$(find "$work/smallest" -type f | wc -l)" "$name"
  done
fi
exit "$failed"
