"""How long ranks wait for the exchanges of local steps.

A rank has one thread for exchanges. It takes them in the order in which they begin, and the steps
go on meanwhile, until a result is due (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512,
section 2.2). Without `delay` a result is due at once: a step then waits for the whole exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.local_schedule import Schedule

_CYCLES = 4  # of `every` steps, until waiting is the same in each


def exposed_seconds(
    schedule: Schedule, compute_seconds: float, exchange_seconds: Sequence[float]
) -> float:
    """The mean waiting of a step. compute_seconds: of a step that exchanges nothing.
    exchange_seconds: of each fragment's exchange."""
    now = free = 0.0  # free: when the thread for exchanges is
    under_way: dict[int, tuple[int, float]] = {}  # fragment: the step in which it is due, its end
    ends = []  # of each step
    for step in range(1, _CYCLES * schedule.every + 1):
        now += compute_seconds
        for fragment, seconds in enumerate(exchange_seconds):
            if schedule.begins(fragment, step):
                now = max(now, under_way.pop(fragment, (0, now))[1])
                free = max(now, free) + seconds
                under_way[fragment] = (step + schedule.delay, free)
        for fragment, (due, end) in list(under_way.items()):
            if due == step:
                now = max(now, end)
                del under_way[fragment]
        ends.append(now)
    return (ends[-1] - ends[-1 - schedule.every]) / schedule.every - compute_seconds
