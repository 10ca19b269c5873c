#!/usr/bin/env python3
"""What TernGrad's clipping takes from the average gradient, by the number of workers.

    python bench/clipping.py [--workers 2,4,16,64] [--steps 1500]

Trains LeNet without compression on a total batch of 64, as figure 3 of `gradwire evaluate terngrad`
does, and looks at 20 steps. Each worker's gradient is clipped at 2.5 standard deviations of its
tensor. Printed are means over the steps of two ratios of norms, over all compressed tensors:

  a worker   of what is cut from a worker's gradient to that gradient
  average    of what is missing from the average gradient to that average

The error of ternary values is random and falls with the number of workers; this one is the same in
all workers where their gradients agree, so it stays.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import gradwire.train.data
from gradwire.evaluate.arms import HOOK, Setup, arm
from gradwire.train.loop import Trainer
from gradwire.train.one_process import OneProcess
from gradwire.train.settings import Run, TrainSettings

TOTAL_BATCH, RATE = 64, 0.01
LOOKS = 20
CLIP = 2.5  # standard deviations; TernGrad, section 3.3
Values = NDArray[np.float64]


class Watching(OneProcess):
    """Keeps both ratios at some steps."""

    def __init__(self, model: nn.Module, codec: str, settings: TrainSettings) -> None:
        super().__init__(model, codec, settings)
        *lengths, _ = self._replica.segments()
        self._ends = np.cumsum(lengths)
        self._every_so_many = settings.steps // LOOKS
        self.of_worker: list[float] = []
        self.of_average: list[float] = []

    def _exchange(self) -> Values:
        if self._step % self._every_so_many == 0:
            own = self._gradients.numpy()[:, : self._ends[-1]].astype(np.float64)
            cut = own - clip(own, self._ends)
            norms = np.linalg.norm(cut, axis=1) / np.linalg.norm(own, axis=1)
            self.of_worker.append(float(norms.mean()))
            missing, average = (np.linalg.norm(each.mean(axis=0)) for each in (cut, own))
            self.of_average.append(float(missing / average))
        return super()._exchange()


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
    watching: list[Watching] = []

    def choose(model: nn.Module, codec: str, chosen: TrainSettings, _: object) -> Watching:
        watching.append(Watching(model, codec, chosen))
        return watching[0]

    given = gradwire.train.data.load(settings.data, settings.data_dir)
    trainer = Trainer(settings, given, 0, None, torch.device("cpu"))
    trainer.run(Run("raw", 0), lambda event: None, choose)
    return watching[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="2,4,16,64")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    store = dist.HashStore()  # type: ignore[attr-defined] # PyTorch hides it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(f"{'workers':>7} {'batch':>5} {'a worker':>9} {'average':>9}")
    for workers in map(int, given.workers.split(",")):
        found = measure(workers, given.steps)
        means = f"{fmean(found.of_worker):9.3f} {fmean(found.of_average):9.3f}"
        print(f"{workers:7} {TOTAL_BATCH // workers:5} {means}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
