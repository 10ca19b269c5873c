"""Time and bytes to a loss."""

from __future__ import annotations

from collections.abc import Sequence


def steps_to(evaluations: Sequence[Sequence[float]], target: float) -> float | None:
    """Steps until the loss is at most the target, between two evaluations on a straight line; None
    if it never is. evaluations: steps, seconds, loss."""
    before: Sequence[float] | None = None
    for evaluation in evaluations:
        step, _, loss = evaluation
        if loss <= target:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[2] - target) / (before[2] - loss)
        before = evaluation
    return None


def total(steps: float, step: float, plain: float, plain_steps: int) -> float:
    """Seconds or bytes of so many steps, of which the first `plain_steps` cost what DDP's do."""
    first = min(steps, plain_steps)
    return first * plain + (steps - first) * step
