#!/usr/bin/env python3
"""What TernGrad's clipping takes from the average gradient, by the number of workers.

    python bench/clipping.py [--workers 2,4,16,64] [--steps 1500]

Trains LeNet without compression on a total batch of 64, as figure 3 of `gradwire evaluate terngrad`
does, and looks at 20 steps. Each worker's gradient is clipped at 2.5 standard deviations of its
tensor. Printed are means over the steps, over all compressed tensors together:

  length   by how much a worker's gradient becomes shorter, as a share of its length. The paper has
           1.0 to 1.5 %, and 2 to 3 degrees (section 3.3, with AlexNet)
  angle    in degrees, by which its direction changes
  missing  length of what the average gradient lacks, as a share of its own length

The error of ternary values is random and falls with the number of workers. This one is the same in
all workers where their gradients agree, so it stays.
"""

from __future__ import annotations

import argparse
import itertools
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import gradwire_lab.train.data
from gradwire_lab.evaluate.arms import HOOK, Setup, arm
from gradwire_lab.evaluate.observe import flat_gradient, is_coded
from gradwire_lab.train import strategies
from gradwire_lab.train.loop import Trainer
from gradwire_lab.train.settings import Run, TrainSettings
from gradwire_lab.train.strategy import Strategy

TOTAL_BATCH, RATE = 64, 0.01
LOOKS = 20
CLIP = 2.5  # standard deviations; TernGrad, section 3.3
Values = NDArray[np.float64]


class Watching:
    """Keeps what clipping does at some steps, of workers in one process."""

    def __init__(self, settings: TrainSettings) -> None:
        self._workers = settings.workers
        self._every_so_many = settings.steps // LOOKS
        self._gradients: list[list[NDArray[np.float32]]] = []  # of each worker, in a step
        self.found: dict[str, list[float]] = {"length": [], "angle": [], "missing": []}

    def choose(
        self, model: nn.Module, codec: str, settings: TrainSettings, group: dist.ProcessGroup
    ) -> Strategy:
        """As strategies.choose; called by every worker."""
        strategy = strategies.choose(model, codec, settings, group)
        coded = [p for p in model.parameters() if is_coded(p, settings)]
        steps = itertools.count()

        def look(*_: object) -> None:
            if next(steps) % self._every_so_many == 0:
                self._gradients.append([flat_gradient(parameter) for parameter in coded])
                if len(self._gradients) == self._workers:
                    self._look()

        strategy.optimizer.register_step_pre_hook(look)
        return strategy

    def _look(self) -> None:
        gradients, self._gradients = self._gradients, []
        ends = np.cumsum([tensor.size for tensor in gradients[0]])
        own = np.array([np.concatenate(tensors) for tensors in gradients], dtype=np.float64)
        clipped = clip(own, ends)
        lengths, shorter = (np.linalg.norm(each, axis=1) for each in (own, clipped))
        cosines = (own * clipped).sum(axis=1) / (lengths * shorter)
        average = own.mean(axis=0)
        missing = np.linalg.norm(average - clipped.mean(axis=0)) / np.linalg.norm(average)
        self.found["length"].append(float(np.mean(1 - shorter / lengths)))
        self.found["angle"].append(float(np.mean(np.degrees(np.arccos(cosines)))))
        self.found["missing"].append(float(missing))


def clip(gradients: Values, ends: NDArray[np.int64]) -> Values:
    """gradients: workers x values. Clips each tensor of each worker."""
    clipped = []
    for tensor in np.split(gradients, ends[:-1], axis=1):
        most = CLIP * tensor.std(axis=1, keepdims=True)
        clipped.append(np.clip(tensor, -most, most))
    return np.concatenate(clipped, axis=1)


def measure(workers: int, steps: int) -> Watching:
    one = arm(
        "lenet",
        "raw",
        exchange=HOOK,
        workers=workers,
        batch=TOTAL_BATCH // workers,
        learning_rate=RATE / workers,  # it is multiplied by the workers
        schedule="poly",
        steps=steps,
    )
    settings = one.settings(0, Setup())
    watching = Watching(settings)
    given = gradwire_lab.train.data.load(settings.data, settings.data_dir)
    trainer = Trainer(settings, given, 0, None, torch.device("cpu"))
    trainer.run(Run("raw", 0), lambda event: None, watching.choose)
    return watching


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="2,4,16,64")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    print("workers  batch  length  angle  missing")
    for workers in map(int, given.workers.split(",")):
        length, angle, missing = map(fmean, measure(workers, given.steps).found.values())
        batch = TOTAL_BATCH // workers
        print(f"{workers:7} {batch:6} {length:7.1%} {angle:6.1f} {missing:8.1%}", flush=True)


if __name__ == "__main__":
    main()
