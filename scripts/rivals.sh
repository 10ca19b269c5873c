#!/usr/bin/env bash
# Makes an environment for each rival in build/rivals, runs what docs/results/rivals.jsonl lacks,
# and draws docs/results/rivals.md from it. Takes hours; needs root, for the links.
#
# Usage: scripts/rivals.sh [--environments] [SEEDS]
#   --environments  only make the environments
#   SEEDS           whole trainings of each way (default 1)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

only=no
if [[ ${1-} == --environments ]]; then
  only=yes
  shift
fi
python=.venv/bin/python
# torch as in .venv, so that no CUDA comes along. hivemind's 8 bits fail with a newer NumPy.
while read -r name packages; do
  scripts/overlay_venv.sh "build/rivals/$name"
  read -ra wanted <<<"$packages"
  "$python" -m pip --disable-pip-version-check --no-input --python "build/rivals/$name" \
    install -q "${wanted[@]}" "$(grep -E '^torch==' constraints.txt)"
done <<'RIVALS'
torchft torchft==0.2.0
hivemind hivemind==1.1.12 numpy<2.3
flwr flwr==1.42.0
RIVALS
[[ $only == no ]] || exit 0

export OMP_NUM_THREADS=1
"$python" bench/time_to_loss.py tune
"$python" bench/time_to_loss.py train --seeds "${1-1}"
"$python" bench/time_to_loss.py link
whole() { "$python" bench/time_to_loss.py whole "$@"; }
whole --way 'compress, small' --bandwidth 100mbit --until 2.45
whole --way 'DiLoCo, small' --bandwidth 10mbit --until 2.56
whole --way 'DiLoCo, half-byte' --bandwidth 10mbit --until 2.45
whole --way 'hook, small' --bandwidth 100mbit --until 2.45
whole --way DDP --bandwidth 100mbit --until 2.45
whole --way 'compress, small, every=2' --bandwidth 100mbit --until 2.45
whole --way 'torchft, DiLoCo, buckets' --bandwidth 100mbit --until 2.45
whole --way 'hivemind, 8 bits' --bandwidth 100mbit --until 2.45
whole --way 'Flower, FedAvg' --bandwidth 100mbit --until 2.45
"$python" bench/time_to_loss.py page
