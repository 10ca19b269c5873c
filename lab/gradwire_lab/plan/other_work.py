"""How busy other work keeps the cores while something is measured."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from gradwire_lab.train import messages

_STATISTICS, _BOOT = Path("/proc/stat"), Path("/proc/sys/kernel/random/boot_id")
_BUSY = (1, 2, 3, 8)  # columns of a core: user, nice, system, and what a hypervisor took


class OtherWork:
    """The cores that work other than the ranks' has used since this was made.

    All ranks of the default process group make it together, and ask it together. Children of a rank
    count as its own work when they have ended.
    """

    def __init__(self) -> None:
        self._began = _now()

    def cores(self) -> float:
        """So many were busy on average, on the machine where these were most; 0 where the system
        does not say."""
        passed = [now - then for now, then in zip(_now(), self._began, strict=True)]
        machines: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for machine, *times in messages.gather([_machine(), *passed]):
            machines[machine].append(tuple(times))
        found = []
        for ranks in machines.values():
            seconds, busy, _ = ranks[0]
            found.append((busy - sum(own for *_, own in ranks)) / seconds)
        return max(0.0, *found)


def _now() -> tuple[float, float, float]:
    """Seconds: of a clock, in which cores were busy, of this process and its children."""
    busy, ticks = 0, os.sysconf("SC_CLK_TCK")
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    with suppress(OSError):
        for line in _STATISTICS.read_text().splitlines():
            columns = line.split()
            if columns[0] in mine:
                busy += sum(int(columns[place]) for place in _BUSY)
    return time.perf_counter(), busy / ticks, sum(os.times()[:4])


def _machine() -> str:
    """The same for all ranks of a machine, whatever network each of them sees."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return os.uname().nodename
