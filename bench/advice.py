#!/usr/bin/env python3
"""Compares what `gradwire.torch.advise` predicts with measured steps behind shaped links.

    bench/advice.py [--bandwidth 10mbit --bandwidth 100mbit] [--workers 2] [--model lenet]
    bench/advice.py --probe-only

Workers in network namespaces, each behind a rate-limited link, call `advise` with a model, and then
take steps with DDP and with some of the codecs. A step lasts from a barrier of all ranks to the end
of the last one's step; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from gradwire_lab.train.settings import parse_bandwidth
from ranks import join, run_ranks

_CODECS = ("ddp", "bf16", "3lc:s=1.00,coder=rice")
_STEPS, _LEFT_OUT = 14, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bandwidth", action="append", default=None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--probe-only", action="store_true", help="measure the links alone")
    parser.add_argument("--out", type=Path, help="JSON of all that was measured")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    found = {}
    for bandwidth in arguments.bandwidth or ["10mbit", "100mbit"]:
        found[bandwidth] = compare(arguments, bandwidth)
        show(bandwidth, found[bandwidth])
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def compare(arguments: argparse.Namespace, bandwidth: str) -> dict[str, Any]:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def command(rank: int) -> list[str]:
            options = ["--workers", str(arguments.workers), "--model", arguments.model]
            options += ["--probe-only"] * arguments.probe_only
            return [*options, "--rank", str(rank), "--result", str(result)]

        run_ranks(command, arguments.workers, parse_bandwidth(bandwidth))
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def show(bandwidth: str, found: dict[str, Any]) -> None:
    print(f"{bandwidth}: {found['links']}")
    for codec, (predicted, measured) in found.get("steps", {}).items():
        print(
            f"  {codec:24} predicted {predicted * 1e3:7.1f} ms, measured {measured * 1e3:7.1f} ms, "
            f"ratio {predicted / measured:.2f}"
        )


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist

    from gradwire.torch import advise
    from gradwire_lab.plan.links import probe

    join(arguments.rank, arguments.workers)
    if arguments.probe_only:
        links = probe(ranks_per_machine=1)
        found: dict[str, Any] = {
            "links": links.describe(),
            "bandwidth": links.bandwidth,
            "latency": links.latency,
        }
    else:
        model, step = make(arguments.model, arguments.rank)
        advice = advise(model, step, codecs=_CODECS[1:], ranks_per_machine=1)
        predicted = {
            p.codec: p.seconds for p in advice.plan.predictions if p.exchange in ("ddp", "sharded")
        }
        measured = {codec: measure(arguments, codec) for codec in _CODECS}
        found = {
            "links": advice.links.describe(),
            "steps": {codec: (predicted[codec], measured[codec]) for codec in _CODECS},
        }
    if arguments.rank == 0:
        arguments.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def make(name: str, rank: int) -> tuple[Any, Callable[[Any], None]]:
    """A model of `gradwire train`, and what a step does with it."""
    import torch

    from gradwire_lab.train import data, models
    from gradwire_lab.train.options import from_options

    options = {"model": name, "workers": 2, "steps": 100, "exchange": "sharded", "every": 1}
    settings = from_options(options)
    images = data.load(settings.data, settings.data_dir)
    model = models.build(name, *images.shape, seed=0, width=settings.width, dropout=0.0)
    batches = images.batches(settings.batch, 2, rank % 2, 0)
    numbers = iter(range(10**9))

    def step(module: Any) -> None:
        inputs, targets = (torch.from_numpy(array) for array in batches.at(next(numbers)))
        torch.nn.functional.cross_entropy(module(inputs), targets).backward()

    return model, step


def measure(arguments: argparse.Namespace, codec: str) -> float:
    """Seconds of a step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.torch import GradwireState, gradwire_hook

    model, step = make(arguments.model, arguments.rank)
    module = DistributedDataParallel(model)
    if codec != "ddp":
        module.register_comm_hook(GradwireState(codec, start_iter=2), gradwire_hook)
    seconds = []
    for _ in range(_STEPS):
        model.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        step(module)
        taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
    return median(seconds[_LEFT_OUT:])


if __name__ == "__main__":
    main()
