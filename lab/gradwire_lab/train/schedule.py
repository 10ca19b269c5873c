"""The learning rate of a step."""

from __future__ import annotations

import math

from gradwire_lab.train.settings import TrainSettings

FINAL_SHARE = 0.01  # of the first rate, at the end of a cosine (3LC, section 4.3: 0.1 to 0.001)
_POWER = 0.5  # TernGrad, section 4


def first_rate(settings: TrainSettings) -> float:
    """The highest rate. With SGD it grows with the number of workers, as in 3LC, and falls with
    the scale of the loss. Adam's steps do not depend on the size of a gradient, and so not on the
    batch."""
    factor = settings.workers / settings.loss_scale if settings.optimizer == "sgd" else 1
    return settings.learning_rate * factor


def last_share(settings: TrainSettings) -> float:
    """The share of the first rate that is left at the last step."""
    return {"cosine": FINAL_SHARE, "poly": 0.0, "constant": 1.0}[settings.schedule]


def learning_rate(settings: TrainSettings, step: int) -> float:
    """The rate grows linearly for `warmup` steps and then falls until the last step."""
    first = first_rate(settings)
    if step < settings.warmup:
        return first * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(settings.steps - settings.warmup - 1, 1)
    last = last_share(settings)
    if settings.schedule == "poly":
        return first * (1.0 - progress) ** _POWER
    return first * (last + 0.5 * (1.0 - last) * (1.0 + math.cos(math.pi * progress)))
