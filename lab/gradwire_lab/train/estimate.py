"""An estimate, before a run starts, of how long it will take."""

from __future__ import annotations

from statistics import fmean

import numpy as np
from numpy.typing import NDArray

import gradwire
from gradwire._core import AutoGoal, is_goal
from gradwire_lab.train import rivals
from gradwire_lab.train.rivals import is_rival
from gradwire_lab.train.settings import TrainSettings, both_ways

_SAMPLE = 40960


def estimate_seconds(
    settings: TrainSettings, parameters: int, step_seconds: float, evaluation_seconds: float
) -> dict[str, float]:
    """Seconds of a run of each codec, evaluations included.

    step_seconds, evaluation_seconds: as measured by the workers (loop.Trainer.measure_speed). The
    time on the wire is the bytes of a push and a pull over the bandwidth. The codec is assumed to
    make as many bits a value as of normally distributed values, even of small tensors, which go
    raw. Each server receives the pushes of all workers, for its share of the tensors, over one
    link.
    """
    evaluations = -(-settings.steps // settings.eval_every)
    estimates = {}
    for codec in settings.codecs:
        wire = 0.0
        if settings.bandwidth is not None:
            wire = parameters * typical_bits_per_value(codec) / settings.bandwidth
            if is_rival(codec) or not settings.has_servers:
                machines = settings.workers // settings.ranks_per_machine
                wire *= 2 * (machines - 1) / machines
            else:
                wire *= 2 * settings.workers / settings.servers
            wire /= 1 if is_rival(codec) else settings.every
        estimates[codec] = settings.steps * (step_seconds + wire) + evaluations * evaluation_seconds
    return estimates


def typical_bits_per_value(codec: str) -> float:
    """Bits a value that the codec makes of normally distributed values, mean of both ways. `auto`
    makes as many as its choice for them."""
    if is_rival(codec):
        return rivals.parse(codec).bits
    values = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)
    return fmean(_bits_per_value(way, values) for way in both_ways(codec))


def _bits_per_value(codec: str, values: NDArray[np.float32]) -> float:
    if is_goal(codec):
        goal = AutoGoal(codec)
        bits: float = goal.choose([goal.try_candidates(values)], goal.limit)["bits"]
        return bits
    return 8 * len(gradwire.encode(values, codec)) / _SAMPLE
