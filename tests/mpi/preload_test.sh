#!/usr/bin/env bash
# Tests the preload library with an unchanged program. Usage: preload_test.sh MPIRUN_SCRIPT LIBRARY
# PROGRAM FAKE_CUDA
set -euo pipefail
mpirun=$1 library=$2 program=$3 fake_cuda=$4
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
config=$folder/config

# run NAME=VALUE... -- ARGUMENTS: sets `output` (stdout and stderr) and `status`.
run() {
  local environment=(LD_PRELOAD="$library")
  while [[ $1 != -- ]]; do environment+=("$1") && shift; done
  shift
  status=0
  # Only the program gets the library, not mpirun itself.
  output=$("$mpirun" -n 3 env "${environment[@]}" "$program" "$@" 2>&1) || status=$?
}
expect() {
  [[ $output == *"$1"* ]] || { printf 'no "%s" in:\n%s\n' "$1" "$output" >&2 && exit 1; }
}
expect_not() {
  [[ $output != *"$1"* ]] || { printf '"%s" in:\n%s\n' "$1" "$output" >&2 && exit 1; }
}

run GRADWIRE_MPI_CONFIG= --
((status == 0))
expect exact
expect_not gradwire
run --
((status == 0))
expect exact
[[ $(grep -c "^gradwire: nothing is compressed: GRADWIRE_MPI_CONFIG names" <<<"$output") == 1 ]]

printf '# test\ncodec = bf16\nmin-bytes = 1000\nexchange = ring\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" --
((status == 0))
expect rounded
expect "gradwire: MPI_Allreduce of MPI_FLOAT with MPI_SUM is compressed from 1000 bytes on: codec bf16"
expect "exchange ring"
expect "gradwire: rank 0: 2 calls of MPI_Allreduce compressed, 3 passed on"
[[ $(grep -c '^gradwire' <<<"$output") == 2 ]]
expect_not WARNING

printf 'codec = int8\nmin-bytes = 1000\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" -- nan
((status == 0))
expect "is not finite at element 5 of buffer"
expect "WARNING: codec int8 is made for error feedback"
expect "1 done again as they were not finite"

printf 'codec = fp16\nmin-bytes = 1000\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" -- beyond-fp16
((status == 0))
expect "a sum is not finite; this call is done again without compression"
expect "1 done again as they were not finite"
run GRADWIRE_MPI_CONFIG="$config" -- device "$fake_cuda"
((status == 0)) || { printf '%s\n' "$output" >&2 && exit 1; }
expect "gradwire: rank 0: 5 calls of MPI_Allreduce compressed, 3 passed on, 1 done again"

printf 'codec = bf16\nmin-bytes = 1000\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" -- no-memory
((status == 0)) || { printf '%s\n' "$output" >&2 && exit 1; }
expect "compressed MPI_Allreduce: out of memory"

printf 'codec = terngrad\nmin-bytes = 1000\nexchange = terngrad\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" --
((status == 0))
expect "exchange terngrad"
printf 'codec = int8\nmin-bytes = 1000\nexchange = hierarchical\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" --
((status == 0))
expect exact # one machine
expect "exchange hierarchical:between=sharded"

printf 'codec = int8:ef=off\npull-codec = 3lc\nmin-bytes = 1000\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" --
expect "WARNING: codec 3lc is made for error feedback"
expect_not "codec int8:ef=off is made"

printf 'codec = bf17\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" --
((status != 0))
expect bf17
printf 'codec = bf16\ncolour = red\n' >"$config"
run GRADWIRE_MPI_CONFIG="$config" --
((status != 0))
expect "config:2: 'colour = red' is no line"

# refused TEXT LINE...: the file of these lines ends the job, also one that makes no large call.
refused() {
  printf '%s\n' "${@:2}" >"$config"
  run GRADWIRE_MPI_CONFIG="$config" --
  ((status != 0)) || { printf 'taken: %s\n' "${*:2}" >&2 && exit 1; }
  expect "$1"
}
size="valid is a size such as 100, 64K, 1M, 2G"
refused "config:2: min-bytes is '1X'; $size" 'codec = bf16' 'min-bytes = 1X'
refused "config:2: min-bytes is '-1'; $size" 'codec = bf16' 'min-bytes = -1'
refused "config:2: min-bytes is '17179869184G'; $size" 'codec = bf16' 'min-bytes = 17179869184G'
refused "config:3: codec is given twice, first in line 1" 'codec = bf16' 'seed = 1' 'codec = raw'
refused "config:2: threads is 'two'; valid is a whole number" 'codec = bf16' 'threads = two'
refused "config:2: codec is ''; valid is a codec" '# the codec' 'codec ='
small='min-bytes = 1G' # no call is large enough to use the options
refused "config: threads must be 1 to 256, got 0" 'codec = bf16' 'threads = 0' "$small"
refused "config: " 'codec = bf16' 'timeout = -1' "$small"
refused "config: 'star' is no exchange" 'codec = bf16' 'exchange = star' "$small"
refused "parameter 'ranks' is given twice" 'codec = bf16' 'exchange = hierarchical:ranks=2,ranks=3'
refused "config: '3lc:ef=on': error feedback works only" 'codec = 3lc:ef=on' "$small"
refused "config: unknown codec 'bf17'" 'codec = bf16' 'pull-codec = bf17' "$small"
printf 'codec=bf16\nmin-bytes=1K\nthreads=2\ntimeout=1.5' >"$config"
run GRADWIRE_MPI_CONFIG="$config" --
((status == 0))
expect "compressed from 1024 bytes on"

run GRADWIRE_MPI_CONFIG="$folder/none" --
((status != 0))
expect "none: can't be read"
echo ok
