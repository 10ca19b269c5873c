#!/usr/bin/env bash
# Runs mpirun with the options that a test machine needs: more ranks than processors, ranks that
# yield the processor while they wait, and permission to run as root. Takes mpirun's arguments.
set -euo pipefail
mpirun=${MPIRUN:-mpirun}
options=()
if [[ $("$mpirun" --version) =~ "Open MPI"|OpenRTE ]]; then
  # Use only this machine, without its network cards and without a resource manager.
  options=(--oversubscribe --bind-to none --mca btl "self,vader" --mca plm isolated
    --mca mpi_yield_when_idle 1)
  ((EUID != 0)) || options+=(--allow-run-as-root)
fi
exec "$mpirun" "${options[@]}" "$@"
