"""Which codecs an exchange bears: the loss of two small trainings, all ranks in one process.

    python bench/ring_codecs.py ring/raw ring/int8 ring/3lc:s=1 sharded/3lc:s=1 [--ranks 4,8]

Prints a row of the table in docs/results/exchanges.md for each exchange/codec: the mean loss
over the seeds after the last step, and the bits a value. The trainings are least squares and a
classifier on data that a random network labels; both with SGD, momentum 0.9 and a learning rate
that falls to 0.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import lockstep
from gradwire._core import Exchange, Layout

SAMPLES, BATCH, STEPS, RAW_STEPS = 4000, 32, 300, 2
RATE, MOMENTUM = 0.1, 0.9
DIVERGED = 100.0


class Task(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def least_squares(random: torch.Generator) -> Task:
    inputs = torch.randn(SAMPLES, 256, generator=random) * torch.linspace(0.2, 1.5, 256)
    targets = inputs @ (torch.randn(256, 16, generator=random) / 8)
    targets += 0.1 * torch.randn(SAMPLES, 16, generator=random)
    model = nn.Linear(256, 16, bias=False)
    nn.init.zeros_(model.weight)
    return Task(inputs, targets, model, functional.mse_loss)


def classifier(random: torch.Generator) -> Task:
    inputs = torch.randn(SAMPLES, 32, generator=random)
    first, second = (torch.randn(*shape, generator=random) for shape in ((32, 64), (64, 10)))
    scores = torch.tanh(inputs @ first / 4) @ second
    targets = (scores + 1.5 * torch.randn(SAMPLES, 10, generator=random)).argmax(1)
    layers = [nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return Task(inputs, targets, nn.Sequential(*layers), functional.cross_entropy)


def train(
    make: Callable[[torch.Generator], Task], exchange: str, codec: str, ranks: int, seed: int
) -> tuple[float, float]:
    """The loss on all samples, and the bits a value."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    task = make(random)
    parameters = list(task.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    shapes = [(str(i), list(p.shape)) for i, p in enumerate(parameters)]
    first, later = (
        [Exchange(Layout(shapes, ranks, text), rank, exchange) for rank in range(ranks)]
        for text in ("raw", codec)
    )
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        buckets = []
        for _ in range(ranks):
            batch = torch.randint(0, SAMPLES, (BATCH,), generator=random)
            loss = task.loss(task.model(task.inputs[batch]), task.targets[batch])
            gradients = torch.autograd.grad(loss, parameters)
            buckets.append(torch.cat([g.flatten() for g in gradients]).numpy())
        lockstep.average(first if step < RAW_STEPS else later, buckets, step)
        if not np.isfinite(buckets[0]).all():
            return float("nan"), float("nan")
        averages = torch.from_numpy(buckets[0]).split([p.numel() for p in parameters])
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average.view_as(parameter)
        optimizer.step()
    counted = [rank.stats() for rank in later]
    sent = sum(stats["push_bytes"] + stats["pull_packet_bytes"] for stats in counted)
    values = sum(stats["values_pushed"] + stats["values_pulled"] for stats in counted)
    with torch.no_grad():
        return task.loss(task.model(task.inputs), task.targets).item(), 8 * sent / values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ways", nargs="+", metavar="EXCHANGE/CODEC")
    parser.add_argument("--ranks", default="4,8", help="numbers of ranks (4,8)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for way in options.ways:
        exchange, codec = way.split("/", 1)
        cells, bits = [], []
        for make in (least_squares, classifier):
            for ranks in map(int, options.ranks.split(",")):
                runs = [train(make, exchange, codec, ranks, s) for s in range(options.seeds)]
                loss = statistics.mean(run[0] for run in runs)
                cells.append(f"{loss:.3f}" if loss < DIVERGED else "diverges")
                bits += [run[1] for run in runs if run[0] < DIVERGED]
        size = f"{min(bits):.1f} to {max(bits):.1f}" if bits else "-"
        print(f"| `{codec}` | {exchange} | {' | '.join(cells)} | {size} |", flush=True)


if __name__ == "__main__":
    main()
