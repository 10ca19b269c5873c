#!/usr/bin/env bash
# mpirun with what a test machine needs: more ranks than processors, ranks that leave the processor
# to others while they wait, and root where the tests run as root. Takes mpirun's arguments.
set -euo pipefail
mpirun=${MPIRUN:-mpirun}
options=()
if [[ $("$mpirun" --version) =~ "Open MPI"|OpenRTE ]]; then
  # Nothing but this machine: no look at its network cards, no resource manager.
  options=(--oversubscribe --bind-to none --mca btl "self,vader" --mca plm isolated
    --mca mpi_yield_when_idle 1)
  ((EUID != 0)) || options+=(--allow-run-as-root)
fi
exec "$mpirun" "${options[@]}" "$@"
