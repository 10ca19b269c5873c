# shellcheck shell=bash
# Other scripts source this file. It runs commands as steps that show their progress.

# Sets `clock` to the seconds since the microsecond time $1, with one decimal.
read_clock() {
  local tenths=$(((${EPOCHREALTIME/[.,]/} - $1) / 100000))
  clock="$((tenths / 10)).$((tenths % 10))"
}

# Prints a line every 20 s while a step runs: name, seconds, last line of the log.
print_heartbeat() {
  local name=$1 log=$2 start=$3 clock
  trap 'kill "$!" 2>/dev/null; exit 0' TERM
  while sleep 20 & wait "$!" && kill -0 "$$" 2>/dev/null; do
    read_clock "$start"
    printf '      %s: %s s, %s\n' "$name" "${clock%.*}" \
      "$(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c 1-80)"
  done
}

# run_step NAME LOG COMMAND...
# Runs an external command (not a shell function, in which errexit would not work) with its output
# in LOG. Prints a line at the start and a line with the seconds at the end; if the command fails,
# prints the log and the command. Sets `clock`. Returns the command's status.
run_step() {
  local name=$1 log=$2 start=${EPOCHREALTIME/[.,]/} status=0 heartbeat
  shift 2
  mkdir -p "$(dirname "$log")"
  printf '  --> %s\n' "$name"
  print_heartbeat "$name" "$log" "$start" &
  heartbeat=$!
  "$@" >"$log" 2>&1 </dev/null || status=$?
  kill "$heartbeat" 2>/dev/null || true
  wait "$heartbeat" 2>/dev/null || true
  read_clock "$start"
  if ((status != 0)); then
    if (($(wc -l <"$log") > 400)); then
      printf '(the last 400 lines)\n'
    fi
    tail -n 400 "$log"
    printf '  FAILED %s after %s s, exit status %d\n' "$name" "$clock" "$status"
    printf '         command: %s\n         log:     %s\n' "$*" "$log"
    return "$status"
  fi
  printf '      %s: %s s\n' "$name" "$clock"
}
