"""What can go wrong in a training, and what must come of it.

Each fault is applied to one rank, the victim, when that has taken `at_step` steps of `STEPS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from running import Cluster

STEPS = 200
AT_STEP = 100
SAVE_EVERY = 50
RATE = 100_000_000  # bits a second of the links
STARTING = 10.0  # seconds from the start of the processes to their first step


class Must(Enum):
    """What a fault must come to."""

    CHANGE_NOTHING = "every rank ends with exit status 0 and the model of a run without the fault"
    STOP = "every rank stops; the errors name the victim"
    NEVER_BREAK = "every rank stops, or every rank has the model of a run without the fault"


class Network(Enum):
    LOOPBACK = "loopback"
    BRIDGE = "bridge"  # links that can be cut and slowed down
    RELAY = "relay"  # a switch that can change a frame


@dataclass(frozen=True)
class Fault:
    """What happens to the victim.

    apply    called by the driver at that step; None: it lies in the victim's job
    job      what is different in the victim's Job
    at_step  when it happens
    cause    what the error of the victim itself says
    goes_on  whether the victim, which is stopped, is continued when all others have ended
    lasts    seconds by which a fault that must change nothing may hold up the training
    """

    name: str
    words: str
    must: Must
    apply: Callable[[Cluster, int], None] | None = None
    job: dict[str, Any] = field(default_factory=dict)
    at_step: int = AT_STEP
    network: Network = Network.LOOPBACK
    timeout: float = 30.0
    goes_on: bool = False
    shifts_clock: bool = False
    needs_checkpoint: bool = False
    cause: str = ""
    lasts: float = 0.0


def _kill(cluster: Cluster, victim: int) -> None:
    cluster.kill(victim)


def _stop_for_20_seconds(cluster: Cluster, victim: int) -> None:
    cluster.stop(victim)
    cluster.sleep(20.0)
    cluster.go_on(victim)


def _stop(cluster: Cluster, victim: int) -> None:
    cluster.stop(victim)


def _cut_link(cluster: Cluster, victim: int) -> None:
    cluster.bridge.cut(victim)
    cluster.sleep(8.0)
    cluster.bridge.restore(victim)


def _slow_link(cluster: Cluster, victim: int) -> None:
    cluster.bridge.change_rate(victim, cluster.holders[victim], RATE // 100)


def _flip_bit(cluster: Cluster, victim: int) -> None:
    cluster.flip_bit_from(victim)


def _jump_clock(cluster: Cluster, victim: int) -> None:
    """All ranks see it: they are on one machine."""
    for hours in (1, -1, 0):
        cluster.set_clock(3600 * hours)
        cluster.sleep(1.0)


KILLED_EARLY = "killed-early"
NONE = Fault("none", "nothing", Must.CHANGE_NOTHING, at_step=0, lasts=STARTING)
FAULTS = (
    Fault("killed", "a rank is killed (SIGKILL)", Must.STOP, _kill),
    Fault(
        KILLED_EARLY, "a rank is killed before its first step; timeout 30 s", Must.STOP,
        job={"ends_early": True}, at_step=0,
    ),
    Fault(
        "stopped-20s", "a rank is stopped for 20 s (SIGSTOP) and continued; timeout 30 s",
        Must.CHANGE_NOTHING, _stop_for_20_seconds, lasts=20.0,
    ),
    Fault(
        "stopped", "a rank is stopped beyond the timeout of 15 s", Must.STOP, _stop,
        timeout=15.0, goes_on=True,
    ),
    Fault(
        "link-cut", "the link of a rank is cut for 8 s", Must.CHANGE_NOTHING, _cut_link,
        network=Network.BRIDGE, lasts=16.0,  # TCP's waits double: the last one ends after the cut
    ),
    Fault(
        "link-slow", "the link of a rank falls from 100 to 1 Mbit/s, for the last 20 steps",
        Must.CHANGE_NOTHING, _slow_link, at_step=180, network=Network.BRIDGE, lasts=60.0,
    ),
    Fault(
        "bit-flipped", "a bit of a message flips, and TCP's checksum fits", Must.NEVER_BREAK,
        _flip_bit, network=Network.RELAY,
    ),
    Fault(
        "disk-full", "the disk is full when a rank writes a checkpoint", Must.STOP,
        job={"disk_kib": 300}, at_step=SAVE_EVERY, cause="No space left on device",
    ),
    Fault(
        "exception", "a rank raises an exception of its own", Must.STOP,
        job={"raise_at": AT_STEP}, cause="the data of this rank cannot be read",
    ),
    Fault(
        "restarted",
        "all ranks restart from a checkpoint of step 100; times count from there",
        Must.CHANGE_NOTHING,
        needs_checkpoint=True,
        lasts=STARTING,
    ),
    Fault(
        "old-checkpoint",
        "all ranks restart from step 100, a rank from step 50; times count from there",
        Must.NEVER_BREAK, job={"resume_from": SAVE_EVERY}, needs_checkpoint=True,
    ),
    Fault(
        "clock-jumps", "the wall clock jumps by 1 h, by -2 h and back", Must.CHANGE_NOTHING,
        _jump_clock, shifts_clock=True, lasts=3.0,
    ),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in (NONE, *FAULTS)}
