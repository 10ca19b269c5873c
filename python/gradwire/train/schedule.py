"""The learning rate of a step (3LC, section 4.3)."""

from __future__ import annotations

import math

FINAL_SHARE = 0.01  # of the first rate: 0.1 falls to 0.001


def learning_rate(step: int, steps: int, base: float, workers: int) -> float:
    """Cosine decay without restarts over `steps` steps, from base * workers at step 0 to a
    hundredth of it at the last step."""
    first = base * workers
    last = first * FINAL_SHARE
    progress = step / max(steps - 1, 1)
    return last + 0.5 * (first - last) * (1.0 + math.cos(math.pi * progress))
