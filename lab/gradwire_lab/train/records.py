"""The results of one rank in one run. This module needs no PyTorch, unlike loop.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gradwire_lab.json_fields import FromJson
from gradwire_lab.train.network import Bytes


@dataclass(frozen=True)
class MetricValue:
    """The settings' metric, which rank 0 measured after `step` steps and `seconds` of training."""

    step: int
    seconds: float
    value: float


@dataclass(frozen=True)
class StepCosts:
    """What a rank's last step cost: bytes sent, of gradients and of results (with servers,
    pull_bytes: received; for rivals computed); seconds that it waited for messages, and that
    gradwire's own work took, which may both run beside the backward pass. None: unknown."""

    push_bytes: float
    pull_bytes: float
    wire_seconds: float | None = None
    own_seconds: float | None = None


@dataclass
class RankRecord(FromJson):
    """What one rank measured in one run.

    losses, push_bytes, pull_bytes, wire_seconds, own_seconds: one element for each step, None for
    steps that the others took without this rank, and for losses that are not finite; empty on a
    server. The last four are those of StepCosts; empty where they are unknown. step_ends: what the
    training clock showed after each step. seconds: of the training clock. hook: the strategy's
    stats(). link: bytes that the rank's own interface counted while the clock ran; None without an
    interface of its own. parameters_digest: SHA-256 of all parameters after the last step. device:
    the text of devices.describe; empty on a server. diverged: the first step with a loss that is
    not finite, on any rank, or after which the metric is not; the run ended soon after it. failed:
    why the run could not go on; empty: it could. served: the metric of the servers' own model at
    the end, which rank 0 measured with the buffers of its own; None where no server has one, or
    rank 0 averages weights, or it is not finite.
    """

    codec: str
    rank: int
    seconds: float = 0.0
    losses: list[float | None] = field(default_factory=list)
    push_bytes: list[float | None] = field(default_factory=list)
    pull_bytes: list[float | None] = field(default_factory=list)
    evaluations: list[MetricValue] = field(default_factory=list)
    hook: dict[str, Any] | None = None
    link: Bytes | None = None
    parameters_digest: str = ""
    device: str = ""
    seed: int = 0
    diverged: int | None = None
    failed: str = ""
    served: float | None = None
    step_ends: list[float | None] = field(default_factory=list)
    wire_seconds: list[float | None] = field(default_factory=list)
    own_seconds: list[float | None] = field(default_factory=list)

    def note(self, loss: float, seconds: float, costs: StepCosts | None, left_out: int) -> None:
        """Notes a step that this rank took. seconds: what the training clock shows. left_out: the
        steps after it that the others took without this rank."""
        if not math.isfinite(loss) and self.diverged is None:
            self.diverged = len(self.losses) + 1
        self.losses += [loss if math.isfinite(loss) else None] + [None] * left_out
        self.step_ends += [seconds] + [None] * left_out
        for name, cost in (vars(costs) if costs else {}).items():
            if cost is not None:
                getattr(self, name).extend([cost] + [None] * left_out)
