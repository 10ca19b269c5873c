#!/usr/bin/env bash
# Shows gradwire's main use, from a fresh clone to a picture: sets up what is missing, and then
# trains LeNet on Fashion-MNIST with 4 workers, each on a 10 Mbit/s link, four times: with plain
# DDP, with PyTorch's hooks bf16 and PowerSGD, and with gradwire's recommended codec. After the
# set-up it takes less than 5 minutes on 2 idle cores; on very busy ones it took 9. Prints the
# table of times and accuracies; writes results/demo/report.json, accuracy.png (accuracy over time)
# and other pictures beside it. The links need root; without it the times are modelled.
#
# Usage: scripts/demo.sh [OPTION...]
#   OPTION   for `gradwire train`, overrides scripts/demo.toml (such as --steps 100, --seed 1)
#
# An environment in .venv that is there already gets what the demo needs, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
esac

scripts/setup.sh --demo
exec .venv/bin/gradwire train --config scripts/demo.toml \
  --json results/demo/report.json --plots results/demo "$@"
