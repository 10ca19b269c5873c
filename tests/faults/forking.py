"""Forks the ranks' processes, because importing PyTorch takes seconds.

    python forking.py

Each line of the input is a Job as JSON, with "output", the file for what the rank prints. Each line
of the output says which process was started, {"started": rank, "pid"}, or has ended, {"ended": pid,
"status", "at"}: the status as in subprocess, and time.monotonic().

A rank's process returns from here to the end of this script, so that it ends as any Python program
does: with the traceback of an exception, exit handlers and threads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it

import training_ways

_LOOK_SECONDS = 0.02
_CLONE_NEWNS, _CLONE_NEWNET, _MS_PRIVATE = 0x00020000, 0x40000000, 0x44000
_PR_SET_PDEATHSIG = 1


def serve() -> dict[str, Any] | None:
    """Returns a job in the process that is to do it, and None at the end of the input."""
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        if readable:
            piece = os.read(0, 65536)
            if not piece:
                return None
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                job: dict[str, Any] = json.loads(line)
                if (pid := os.fork()) == 0:
                    return job
                _say(started=job["rank"], pid=pid)
        _report_ended()


def _report_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(ended=pid, status=os.waitstatus_to_exitcode(status), at=time.monotonic())


def _say(**words: object) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def become_rank(job: dict[str, Any]) -> training_ways.Job:
    """Gives the process its own output, disk and network."""
    libc = ctypes.CDLL(None, use_errno=True)
    _require(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    output = os.open(job.pop("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    made = training_ways.Job(**job)
    if made.disk_kib is not None:
        _require(libc.unshare(_CLONE_NEWNS))
        _require(libc.mount(b"none", b"/", None, _MS_PRIVATE, None))
    if made.namespace is not None:
        with open(f"/proc/{made.namespace}/ns/net", "rb") as namespace:
            _require(libc.setns(namespace.fileno(), _CLONE_NEWNET))
    faulthandler.register(signal.SIGUSR1)  # shows where a rank hangs
    return made


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


torch.set_num_threads(1)
# The end of a rank does not look through what was imported here, which is most of a second.
gc.freeze()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the driver alone
task = serve()
if task is not None:
    assigned = become_rank(task)
    if assigned.way == "store":
        training_ways.host_store(assigned)
    else:
        training_ways.train(assigned)
    sys.stdout.flush()
