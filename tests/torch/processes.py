"""What Linux says of processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def status_of(pid: int | str, name: str) -> int:
    """A number of /proc/PID/status: VmRSS and VmHWM (kB), Threads and others. pid: or "self"."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"\n{name}:")[2].split()[0])


def processes_of(pid: int) -> dict[int, int]:
    """All that descend from a process, and the network namespace of each."""
    found: dict[int, int] = {}
    parents = [pid]
    for parent in parents:
        for child in _children(parent):
            with contextlib.suppress(OSError):  # it has just ended
                found[child] = Path(f"/proc/{child}/ns/net").stat().st_ino
                parents.append(child)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found
