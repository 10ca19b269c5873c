"""Ranks that mpirun starts, in the place of forks (running.py)."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

from gradwire_lab.train import network
from running import clock_library

_MPIRUN = Path(__file__).parents[1] / "mpi/mpirun.sh"
_LEAVE_SECONDS = 10.0


class MpiRanks:
    """Starts a job when it has the jobs of all ranks. With `--enable-recovery` mpirun lets the
    others live when a rank dies: by default it would end them, and name the rank itself."""

    def __init__(self, program: Path, clock: Path | None = None) -> None:
        self._program = program
        self._environment = dict(os.environ)
        if clock is not None:
            shifted = {"LD_PRELOAD": str(clock_library()), "FAULTS_CLOCK": str(clock)}
            self._environment |= shifted
        self._jobs: list[dict[str, Any]] = []
        self._pids: dict[int, int] = {}  # of each rank
        self._ended: set[int] = set()  # ranks
        self._mpirun: subprocess.Popen[bytes] | None = None

    def ask(self, job: dict[str, Any]) -> None:
        self.close()
        self._jobs = [*self._jobs[: job["rank"]], job]
        if len(self._jobs) < job["world_size"]:
            return
        self._pids.clear()
        self._ended.clear()
        arguments: list[str] = []
        for each in self._jobs:
            host = ["-H", network.address(each["rank"])] if "namespace" in each else []
            program = ["-n", "1", *host, "sh", "-c", self._script(each)]
            arguments += [*([":"] if arguments else []), *program]
        mpirun = _in_namespaces(self._jobs) if "namespace" in job else [str(_MPIRUN)]
        self._mpirun = subprocess.Popen(
            [*mpirun, "--enable-recovery", *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=(Path(job["folder"]) / "output-mpirun").open("ab"),
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def _script(self, job: dict[str, Any]) -> str:
        folder, rank = Path(job["folder"]), job["rank"]
        checkpoints = folder / "checkpoints" / str(rank)
        checkpoints.mkdir(parents=True, exist_ok=True)
        for path in (folder / f"pid-{rank}", folder / f"status-{rank}"):
            path.unlink(missing_ok=True)
        program = shlex.join([
            str(self._program), str(folder), str(rank), str(job["steps"]), str(job["timeout"]),
            str(job.get("raise_at", -1)), str(job["save_every"]), str(job.get("resume_from", 0)),
        ])  # fmt: skip
        if (size := job.get("disk_kib")) is not None:
            mount = f"mount -t tmpfs -o size={size}k disk {shlex.quote(str(checkpoints))}"
            program = shlex.join(["unshare", "--mount", "sh", "-c", f"{mount} && exec {program}"])
        return (
            f"cd {shlex.quote(str(folder))}; {program} >> {shlex.quote(job['output'])} 2>&1 &\n"
            f"echo $! > pid-{rank}.new; mv pid-{rank}.new pid-{rank}\n"
            f"wait $!; echo $? > status-{rank}.new; mv status-{rank}.new status-{rank}"
        )

    def said(self) -> list[dict[str, Any]]:
        """As Forks.said."""
        events: list[dict[str, Any]] = []
        for job in self._jobs if self._mpirun is not None else []:
            rank, folder = job["rank"], Path(job["folder"])
            if rank not in self._pids and (folder / f"pid-{rank}").exists():
                self._pids[rank] = int((folder / f"pid-{rank}").read_text())
                events.append({"started": rank, "pid": self._pids[rank]})
            status = folder / f"status-{rank}"
            if self._pids.get(rank) and status.exists():
                code = int(status.read_text())
                status.unlink()
                code = 128 - code if code > 128 else code  # of a signal, as subprocess has it
                ended = {"ended": self._pids[rank], "status": code, "at": time.monotonic()}
                events.append(ended)
                self._ended.add(rank)
        if self._jobs and len(self._ended) == self._jobs[0]["world_size"]:
            self.close()  # while there is the network over which it ends its daemons
        return events

    def close(self) -> None:
        """Ends mpirun, whose ranks have ended."""
        if self._mpirun is None:
            return
        try:
            self._mpirun.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._mpirun.kill()
            self._mpirun.wait()
        self._mpirun = None


def _in_namespaces(jobs: list[dict[str, Any]]) -> list[str]:
    """The beginning of a command that starts each rank on a host of its own: its namespace. Open
    MPI starts its daemons there with a script in the place of ssh, and its messages go over TCP.
    mpirun itself is in the namespace of rank 0."""
    enter = ["nsenter", "--net=/proc/{}/ns/net"]
    agent = Path(jobs[0]["folder"]) / "enter-host"
    hosts = [
        f"{network.address(job['rank'])}) exec {' '.join(enter).format(job['namespace'])} "
        'sh -c "$*";;'
        for job in jobs
    ]
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *hosts, "esac"]))
    agent.chmod(0o755)
    settings = {
        "plm": "rsh",
        "plm_rsh_agent": str(agent),
        "btl": "self,tcp",
        "btl_tcp_if_include": network.INTERFACE,
        "oob_tcp_if_include": network.INTERFACE,
        "mpi_yield_when_idle": "1",
    }
    options = [text for name, value in settings.items() for text in ("--mca", name, value)]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", *as_root, *options]
    return [part.format(jobs[0]["namespace"]) for part in enter] + mpirun
