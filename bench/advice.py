#!/usr/bin/env python3
"""Compares what `gradwire.torch.advise` predicts with measured steps behind shaped links.

    bench/advice.py results [--model gpt] [--workers 2] [--bandwidth 10mbit]
    bench/advice.py results --render
    bench/advice.py results --probe-only

Workers in network namespaces, each behind a rate-limited link, call `advise` with a model, and then
take steps: with SGD, DDP and the hook, and with the optimizer of the model's recipe and LocalSteps
that exchange every second step. The ways take turns in blocks, two before `advise` and two after
it; `alone` are steps of DDP that exchange nothing. A step lasts from a barrier of all ranks to the
end of the last one's step, with the optimizer; figures are medians, of LocalSteps the mean of the
medians of both kinds of steps. A block, and a call of `advise`, in which other work used more than
a tenth of the cores is repeated, up to three times, and then the quietest of them counts. Each
combination leaves a file in the folder and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from gradwire.machine import describe_build, describe_machine
from gradwire_lab.train.settings import parse_bandwidth
from ranks import join, run_ranks

_ALONE, _DDP, _LOCAL = "alone", "ddp", "LocalSteps "
_CODECS = ("int8", "3lc:s=1.00,coder=rice")
_WAYS = (_ALONE, _DDP, *_CODECS, *(_LOCAL + codec for codec in _CODECS))
_EVERY = 2
_T = TypeVar("_T")
_LEFT_OUT, _LEAST, _MOST, _SECONDS = 2, 3, 15, 1.0  # steps of a block; how long they take
_ROUNDS, _TRIES = 2, 3  # blocks before and after `advise`; of a measurement that was disturbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", default=None)
    parser.add_argument("--workers", action="append", type=int, default=None)
    parser.add_argument("--bandwidth", action="append", default=None)
    parser.add_argument("--probe-only", action="store_true", help="measure the links alone")
    parser.add_argument("--render", action="store_true", help="only print the table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    combinations = product(
        arguments.model or ("gpt", "resnet20"),
        arguments.workers or (2, 4),
        arguments.bandwidth or ("10mbit", "100mbit", "1gbit"),
    )
    for model, workers, bandwidth in () if arguments.render else combinations:
        file = arguments.folder / f"{model}-{workers}-{bandwidth}.json"
        if arguments.probe_only:
            print(bandwidth, compare(arguments, model, workers, bandwidth)["links"], flush=True)
        elif not file.exists():
            found = compare(arguments, model, workers, bandwidth)
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"wrote {file}", flush=True)
    if not arguments.probe_only:
        render(arguments.folder)


def compare(
    arguments: argparse.Namespace, model: str, workers: int, bandwidth: str
) -> dict[str, Any]:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def command(rank: int) -> list[str]:
            options = [folder, "--workers", str(workers), "--model", model]
            options += ["--probe-only"] * arguments.probe_only
            return [*options, "--rank", str(rank), "--result", str(result)]

        load = os.getloadavg()[0]
        run_ranks(command, workers, parse_bandwidth(bandwidth))
        found: dict[str, Any] = json.loads(result.read_text())
    return {
        "model": model,
        "workers": workers,
        "bandwidth": bandwidth,
        "load": [load, os.getloadavg()[0]],
        "machine": describe_machine(),
        "build": describe_build(),
        **found,
    }


def render(folder: Path) -> None:
    """Prints a table of all files: measured ms, and the prediction divided by it."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    print(f"| model, workers, link | probed | {' | '.join(f'`{way}`' for way in _WAYS)} |")
    print(f"| --- | ---: | {' | '.join('---:' for _ in _WAYS)} |")
    for one in sorted(found, key=lambda f: (f["model"], f["workers"], f["probed"])):
        cells = [f"{one['model']}, {one['workers']}, {one['bandwidth']}"]
        cells.append(f"{one['probed'] / 1e6:.4g}")
        for way in _WAYS:
            predicted, measured = one["steps"][way]
            cells.append(f"{1e3 * measured:.0f} ({predicted / measured:.2f})")
        print(f"| {' | '.join(cells)} |")


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist

    from gradwire.torch import advise
    from gradwire_lab.plan.links import probe
    from gradwire_lab.plan.trial import slowest

    (workers,), (name,) = arguments.workers, arguments.model
    join(arguments.rank, workers)
    if arguments.probe_only:
        found: dict[str, Any] = {"links": probe(ranks_per_machine=1).describe()}
    else:
        setup = Setup(name, workers, arguments.rank)
        measured = Measured(setup)
        measured.go_on()
        predicted: dict[str, float] = {}
        others: dict[str, list[float]] = {}
        for prefix, every in (("", 1), (_LOCAL, _EVERY)):
            model = setup.build()
            ask = partial(advise, model, setup.step, setup.optimizer(model, prefix), codecs=_CODECS)
            advice, of_others = undisturbed(partial(ask, every=every, ranks_per_machine=1))
            others[f"advise, every {every}"] = [of_others]
            predicted |= {
                (prefix if p.codec != _DDP else "") + p.codec: p.seconds
                for p in advice.plan.predictions
                if p.exchange == "sharded" or (p.codec == _DDP and not prefix)
            }
            predicted.setdefault(_ALONE, advice.profile.compute_seconds)
        measured.go_on()
        taken = slowest(measured.seconds)
        found = {
            "probed": advice.links.bandwidth,
            "links": advice.links.describe(),
            "steps": {way: (predicted[way], middle(way, taken[way])) for way in _WAYS},
            "seconds": taken,
            "cores_of_others": others | measured.others,
        }
    if arguments.rank == 0:
        arguments.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Setup:
    """A model of `gradwire train`, and what a step does with it."""

    def __init__(self, name: str, workers: int, rank: int) -> None:
        from gradwire_lab.train import data
        from gradwire_lab.train.options import from_options

        options = {"model": name, "workers": workers, "steps": 100, "exchange": "sharded"}
        self._settings = settings = from_options(options | {"every": 1})
        images = data.load(settings.data, settings.data_dir)
        self._shape = images.shape
        self._batches = images.batches(settings.batch, workers, rank, 0)
        self._numbers = iter(range(10**9))

    def build(self) -> Any:
        from gradwire_lab.train import models

        settings = self._settings
        return models.build(settings.model, *self._shape, seed=0, width=settings.width, dropout=0.0)

    def optimizer(self, model: Any, way: str) -> Any:
        import torch

        from gradwire_lab.train.strategies import local_optimizer

        if way.startswith(_LOCAL):
            return local_optimizer(model, self._settings)
        return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(self, module: Any) -> None:
        import torch

        arrays = self._batches.at(next(self._numbers))
        inputs, targets = (torch.from_numpy(array) for array in arrays)
        torch.nn.functional.cross_entropy(module(inputs), targets.reshape(-1)).backward()


class Measured:
    """Steps of all ways.

    Attributes:
        seconds: Of each way's steps.
        others: The cores that other work used in each block.
    """

    def __init__(self, setup: Setup) -> None:
        self._made = {way: make(setup, way) for way in _WAYS}
        self.seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
        self.others: dict[str, list[float]] = {way: [] for way in _WAYS}

    def go_on(self) -> None:
        """Blocks of each way."""
        for way, take_step in [*self._made.items()] * _ROUNDS:
            taken, of_others = undisturbed(partial(self._block, way, take_step))
            self.seconds[way] += taken
            self.others[way].append(of_others)

    def _block(self, way: str, take_step: Callable[[], None]) -> list[float]:
        from gradwire_lab.plan.meters import time_together
        from gradwire_lab.plan.trial import slowest

        first = [time_together(take_step) for _ in range(_LEFT_OUT * _turns(way))]
        (longest,) = slowest({way: [max(first[-_turns(way) :])]})[way]
        count = min(max(_LEAST, ceil(_SECONDS / longest)), _MOST)
        return [time_together(take_step) for _ in range(count * _turns(way))]


def undisturbed(measure: Callable[[], _T]) -> tuple[_T, float]:
    """What it returns, and the cores that other work used meanwhile."""
    from gradwire_lab.plan.other_work import OtherWork
    from gradwire_lab.plan.profile import disturbs

    found: list[tuple[_T, float]] = []
    while len(found) < _TRIES:
        others = OtherWork()
        found.append((measure(), others.cores()))
        if not disturbs(found[-1][1], len(os.sched_getaffinity(0))):
            return found[-1]
    return min(found, key=lambda each: each[1])


def middle(way: str, seconds: list[float]) -> float:
    turns = _turns(way)
    return fmean(median(seconds[turn::turns]) for turn in range(turns))


def _turns(way: str) -> int:
    return _EVERY if way.startswith(_LOCAL) else 1


def make(setup: Setup, way: str) -> Callable[[], None]:
    """A function that takes a step of that way."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.torch import GradwireState, LocalSteps, gradwire_hook

    model = setup.build()
    optimizer = setup.optimizer(model, way)
    if way.startswith(_LOCAL):
        module = model
        optimizer = LocalSteps(optimizer, model, way.removeprefix(_LOCAL), every=_EVERY)
    else:
        module = DistributedDataParallel(model)
        if way == _ALONE:
            module.register_comm_hook(None, noop_hook)
        elif way != _DDP:
            module.register_comm_hook(GradwireState(way, start_iter=1), gradwire_hook)

    def take_step() -> None:
        optimizer.zero_grad()
        setup.step(module)
        optimizer.step()

    return take_step


if __name__ == "__main__":
    main()
