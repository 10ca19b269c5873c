#!/usr/bin/env bash
# Shows gradwire's main use, from a fresh clone to a table: sets up what is missing, and then trains
# LeNet on Fashion-MNIST with 4 workers, each on a 10 Mbit/s link, once with each of raw, bf16,
# 3lc:s=1.00 and 3lc:s=1.75. After the set-up it takes less than 5 minutes on 2 cores. Writes
# results/demo/report.json and accuracy.png, loss.png, bits.png beside it. The links need root;
# without it the times are modelled.
#
# Usage: scripts/demo.sh [OPTION...]
#   OPTION   for `gradwire train`, overrides the demo's options (such as --steps 100, --codec raw)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
esac

scripts/setup.sh --demo
exec .venv/bin/gradwire train --workers 4 --bandwidth 10mbit --model lenet --data fashion-mnist \
  --steps 450 --json results/demo/report.json --plots results/demo "$@"
