"""Trainings that log to a list, for the ranks of test_live.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training import loss_of, make_model
from ways import build

STEPS = 5


class Writer:
    """Keeps what a SummaryWriter would write."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


@dataclass
class Logged:
    """What one rank logged. before: `scalars()` before the first step. last: after the last one."""

    written: list[tuple[str, float, int]]
    before: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


def log(way: str, every: int, options: dict[str, Any]) -> Logged:
    training, writer = build(way, make_model(), **options), Writer()
    source = training.source
    source.log_to(writer, every=every)
    before = source.scalars()
    training.run(STEPS, loss_of)
    training.close()
    stats = source.stats().as_dict()
    if training.way.kind == "fsdp":
        stats |= {"weights": source.weights_stats().as_dict()}
    return Logged(writer.written, before, source.scalars(), stats)
