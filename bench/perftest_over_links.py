#!/usr/bin/env python3
"""Runs gradwire-perftest with each rank on a link of limited bandwidth.

    bench/perftest_over_links.py build/release/bench/perftest/gradwire-perftest \\
        --rate 10M --ranks 4 -- --min 1M --max 64M

Every rank has its own network namespace, and mpirun has another; a switch joins them, as in
`gradwire train --bandwidth` (lab/gradwire_lab/train/network.py). mpirun starts a daemon for each
rank as on a cluster, but with this script as the remote shell, which enters the namespace. So all
messages of MPI go over the shaped links.

--rate unshaped: no namespaces; the ranks use MPI's shared memory.

The arguments after `--` go to gradwire-perftest. Needs Open MPI, and root for the network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gradwire_lab.train import network

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
# For the remote shell: the processes that hold the namespaces, by rank, and a folder for files.
_PIDS = "GRADWIRE_PERFTEST_PIDS"
_FOLDER = "GRADWIRE_PERFTEST_FOLDER"


def parse_rate(text: str) -> int | None:
    """The bits per second of a text such as "10M"; None for "unshaped"."""
    if text == "unshaped":
        return None
    number = text.rstrip("KMG")
    if not number.isdigit() or text[len(number) :] not in _UNITS:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a rate as 10M nor 'unshaped'")
    return int(number) * _UNITS[text[len(number) :]]


def mpirun(*options: str) -> list[str]:
    """mpirun with the options of all runs."""
    command = ["mpirun", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", *options]
    return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command


def run_unshaped(ranks: int, program: Sequence[str]) -> int:
    """Runs the program over MPI's shared memory; returns the exit status."""
    command = mpirun("--oversubscribe", "--mca", "btl", "self,vader", "-n", str(ranks))
    return subprocess.run([*command, *program], check=False).returncode


def run_shaped(rate: int, ranks: int, program: Sequence[str]) -> int:
    """Runs the program with a namespace for each rank and for mpirun; returns the exit status."""
    with contextlib.ExitStack() as cleanup:
        attach = cleanup.enter_context(network.shaped_network(rate))
        holders = [cleanup.enter_context(network.held_namespace()) for _ in range(ranks + 1)]
        for rank, holder in enumerate(holders):
            attach(rank, holder)
        addresses = [network.address(rank) for rank in range(ranks)]
        agent = f"{sys.executable} {os.path.abspath(__file__)}"  # this Python has gradwire
        options = mpirun(
            "--host", ",".join(addresses), "-n", str(ranks), "--map-by", "node",
            "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", agent,
            "--mca", "plm_rsh_no_tree_spawn", "1",
            "--mca", "oob_tcp_if_include", network.INTERFACE,
            "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", network.INTERFACE,
        )  # fmt: skip
        environment = os.environ | {
            _PIDS: ",".join(str(holder.pid) for holder in holders),
            _FOLDER: cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")),
        }
        command = _in_namespace(holders[-1].pid, [*options, *program])
        return subprocess.run(command, env=environment, check=False).returncode


def _in_namespace(pid: int, command: Sequence[str]) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *command]


def enter_as_remote_shell(host: str, words: Sequence[str]) -> None:
    """mpirun's remote shell: runs a shell command line in the namespace that stands for a host.

    The daemons of all hosts are on one machine, so each gets its own host name and folder.
    """
    pids = os.environ[_PIDS].split(",")
    rank = [network.address(rank) for rank in range(len(pids))].index(host)
    place = Path(os.environ[_FOLDER]) / str(rank)
    place.mkdir()
    line = f"hostname rank{rank}; export TMPDIR={place}; {' '.join(words)}"
    command = _in_namespace(int(pids[rank]), ["unshare", "--uts", "sh", "-c", line])
    os.execvp(command[0], command)


def main() -> int:
    """Command line entry point; returns the exit status."""
    if _PIDS in os.environ:
        enter_as_remote_shell(sys.argv[1], sys.argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path, help="gradwire-perftest")
    parser.add_argument("--rate", type=parse_rate, required=True, help="10M, 1G, unshaped")
    parser.add_argument("--ranks", type=int, default=2)
    parser.usage = "%(prog)s PROGRAM --rate RATE [--ranks N] [-- ARGUMENTS OF PROGRAM]"
    own = sys.argv[1:]
    end = own.index("--") if "--" in own else len(own)
    given = parser.parse_args(own[:end])
    program = [str(given.program.resolve()), *own[end + 1 :]]
    if given.rate is None:
        return run_unshaped(given.ranks, program)
    reason = network.why_not_shaped()
    if reason is not None:
        print(f"perftest_over_links: {reason}", file=sys.stderr)
        return 1
    return run_shaped(given.rate, given.ranks, program)


if __name__ == "__main__":
    sys.exit(main())
