"""Sizes of the ternary coders on the trits of a real training, compared with their entropy.

    python bench/coders.py [--s 1.00 1.75] [--steps 300] [--json FILE]

Trains ResNet-20 on Fashion-MNIST with 3LC's recipe and 4 simulated workers in one process. Each
worker pushes every tensor through its own compressor; the average is pulled through one more
compressor (3LC, section 3.1). Small and one-dimensional tensors are averaged uncompressed. At an
early, a middle and a late step every tensor's trits are coded with each coder. The sizes are those
of the coded trits, without frame header and scale. The entropy is of order 0, from the frequencies
of the tensor's three trits: a coder that codes each trit by itself with a fixed model needs at
least that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import gradwire
from gradwire.cli.output import print_table, significant
from gradwire_lab.train import data, models, schedule
from gradwire_lab.train.settings import TrainSettings

WORKERS = 4
BATCH = 32
BASE_LEARNING_RATE = 0.1
CODERS = ("none", "zre", "rice")
LEAST_VALUES = 256
SCALE_BYTES = 4


@dataclass(frozen=True)
class Trits:
    """The trits of a tensor that one rank sent. sizes: bits of each coder; entropy: bits."""

    s: float
    direction: str
    step: int
    tensor: str
    values: int
    density: float
    entropy: float
    sizes: dict[str, int]


class Link:
    """A compressor of one tensor and its decoder."""

    def __init__(self, s: float, numel: int) -> None:
        self._compressor = gradwire.Compressor(f"3lc:s={s}", numel)

    def send(self, values: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        return gradwire.decode(self._compressor.encode(values, step))


def train(s: float, steps: int, recorded: list[int], data_dir: Path | None) -> Iterator[Trits]:
    images = data.load_images("fashion-mnist", data_dir)
    settings = TrainSettings(
        learning_rate=BASE_LEARNING_RATE, workers=WORKERS, steps=steps, model="resnet20"
    )
    batches = [data.Batches(images, BATCH, WORKERS, rank, seed=0) for rank in range(WORKERS)]
    model = models.build("resnet20", *images.shape, seed=0)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=BASE_LEARNING_RATE, momentum=0.9, weight_decay=1e-4
    )
    named = dict(model.named_parameters())
    coded = [name for name, p in named.items() if p.dim() > 1 and p.numel() >= LEAST_VALUES]
    pushes = [{name: Link(s, named[name].numel()) for name in coded} for _ in range(WORKERS)]
    pulls = {name: Link(s, named[name].numel()) for name in coded}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(settings, step)
        sums = {name: np.zeros(p.numel(), np.float32) for name, p in named.items()}
        for rank in range(WORKERS):
            pictures, labels = batches[rank].at(step)
            optimizer.zero_grad()
            logits = model(torch.from_numpy(pictures))
            nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
            for name, parameter in named.items():
                assert parameter.grad is not None
                gradient = parameter.grad.numpy().ravel()
                if name in pulls:
                    gradient = pushes[rank][name].send(gradient, step)
                    if step in recorded and rank == 0:
                        yield measure(s, "push", step, name, gradient)
                sums[name] += gradient
        for name, parameter in named.items():
            mean = sums[name] / np.float32(WORKERS)
            if name in pulls:
                mean = pulls[name].send(mean, step)
                if step in recorded:
                    yield measure(s, "pull", step, name, mean)
            parameter.grad = torch.from_numpy(mean).view_as(parameter)
        optimizer.step()


def measure(s: float, direction: str, step: int, tensor: str, sent: NDArray[np.float32]) -> Trits:
    """Measures a tensor. sent: values -m, 0 or m, which 3lc with s=1 encodes to the same trits."""
    counts = np.array([np.sum(sent < 0), np.sum(sent == 0), np.sum(sent > 0)], float)
    shares = counts[counts > 0] / sent.size
    sizes = {}
    for coder in CODERS:
        frame = gradwire.encode(sent, f"3lc:s=1,coder={coder},ef=off")
        sizes[coder] = 8 * max(gradwire.inspect(frame)["payload_bytes"] - SCALE_BYTES, 0)
    return Trits(
        s=s,
        direction=direction,
        step=step,
        tensor=tensor,
        values=sent.size,
        density=1 - float(counts[1]) / sent.size,
        entropy=float(-np.sum(shares * np.log2(shares))) * sent.size,
        sizes=sizes,
    )


def table(found: list[Trits]) -> None:
    rows = []
    for s in dict.fromkeys(t.s for t in found):
        for direction in ("push", "pull"):
            for step in [*dict.fromkeys(t.step for t in found), None]:
                sent = [t for t in found if (t.s, t.direction) == (s, direction)]
                part = [t for t in sent if step in (None, t.step)]
                rows.append((f"{s:.2f}", direction, "all" if step is None else step, *totals(part)))
    for low, high in ((0.1, 1.0), (0.01, 0.1), (0.001, 0.01), (0.0, 0.001)):
        part = [t for t in found if low < t.density <= high]
        if part:
            rows.append(("all", "both", f"{100 * low:g} to {100 * high:g} %", *totals(part)))
    print_table(
        (
            *("s", "direction", "step or density", "tensors", "density %", "entropy"),
            *CODERS,
            *("rice / entropy", "zre / rice"),
        ),
        rows,
    )
    print("entropy and coders: bits per value.")


def totals(part: list[Trits]) -> list[str]:
    values = sum(t.values for t in part)
    entropy = sum(t.entropy for t in part)
    sizes = {coder: sum(t.sizes[coder] for t in part) for coder in CODERS}
    density = sum(t.density * t.values for t in part) / values
    return [
        str(len(part)),
        significant(100 * density),
        significant(entropy / values),
        *(significant(sizes[coder] / values) for coder in CODERS),
        f"{sizes['rice'] / entropy:.3f}",
        f"{sizes['zre'] / sizes['rice']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--s", type=float, nargs="+", default=[1.0, 1.75])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    steps = arguments.steps
    recorded = [steps // 15, steps // 2, steps - steps // 30 - 1]
    found: list[Trits] = []
    for s in arguments.s:
        found += train(s, steps, recorded, arguments.data_dir)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(t) for t in found]))
    table(found)


if __name__ == "__main__":
    main()
