"""Trains every way and prints a digest of what came out.

    frozen.py [--quick] [--way WAY] [--write]

The numbers are the same on every x86 machine: the model multiplies no matrices, a rank has one
thread, PyTorch takes its kernels for the oldest processors, and square roots are rounded as IEEE
754 says. gradwire's own kernels give the same bits anyway.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # PyTorch reads these when it computes for the first time
    os.environ |= {"ATEN_CPU_CAPABILITY": "default", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ["GRADWIRE_JOB_KEY"] = 64 * "0"

import torch
from torch import nn

from cluster import Cluster
from ways import WAYS, build, integers

FILE = Path(__file__).with_name("frozen.json")
STEPS = 20
INPUTS = 4096
OWN = "its own codec"
SQUARE_ROOT = torch.sqrt
Case = tuple[str, int, str]  # way, ranks, codec


class Layer(nn.Module):
    """Half the squared distance of its parameters from the input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(torch.Size(shape).numel(), shape[0]).view(shape))
        self.bias = nn.Parameter(torch.zeros(shape[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for parameter in (self.weight, self.bias):
            difference = parameter - x[: parameter.numel()].view_as(parameter)
            total = total + (difference * difference).sum() / 2
        return total


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(48, 40), Layer(36, 48)
        self.conv, self.last = Layer(12, 9, 3), Layer(12, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x.roll(i)) for i, layer in enumerate(self.children())]).sum()


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    total: torch.Tensor = module(integers(INPUTS, seed=1000 * step + rank))
    return total


def square_root(x: torch.Tensor) -> torch.Tensor:
    """MKL's of a float32, which PyTorch takes, is off by a bit now and then, and on another
    processor at other values. That of a float64, rounded, is the right one."""
    return SQUARE_ROOT(x.double()).to(x.dtype)


def train_each(way: str, codecs: list[str]) -> list[tuple[int, bytes, int]]:
    """With each codec: this rank's number, parameters, and bytes sent."""
    warnings.simplefilter("ignore")  # of coarse gradients
    torch.Tensor.sqrt = torch.sqrt = square_root  # type: ignore[assignment, method-assign]
    results = []
    for codec in codecs:
        options: dict[str, Any] = {} if codec == OWN else {"codec": codec}
        training = build(way, Distances(), **options)
        training.run(STEPS, loss)
        training.settle()
        if training.way.servers:
            training.close()  # the model is the one that a worker leaves with
        values = b"".join(v.contiguous().numpy().tobytes() for v in training.values().values())
        results.append((training.rank, values, training.sent_bytes()))
        training.close()
    return results


def run(cases: Iterable[Case]) -> Iterator[tuple[str, str]]:
    """Each case, with the digest of all ranks' parameters and the bytes that each sent."""
    cluster = Cluster(4)
    for (way, ranks), together in groupby(cases, lambda case: case[:2]):
        codecs = [codec for _, _, codec in together]
        of_ranks = cluster.run(ranks, train_each, way, codecs)
        for codec, *found in zip(codecs, *of_ranks, strict=True):
            digest = hashlib.sha256()
            for _, values, _ in (ordered := sorted(found)):
                digest.update(values)
            sent = " ".join(str(count) for _, _, count in ordered)
            yield name_of((way, ranks, codec)), f"{digest.hexdigest()[:16]} {sent}"
    cluster.close()


def name_of(case: Case) -> str:
    way, ranks, codec = case
    return f"{way}; {ranks} ranks; {codec}"


def every_case() -> list[Case]:
    return [
        (name, ranks, codec)
        for name, way in WAYS.items()
        for ranks in way.ranks
        if ranks > way.servers
        for codec in way.codecs or (OWN,)
    ]


def quick_cases() -> list[Case]:
    """One of each way, with another codec and another number of ranks than its neighbour."""
    chosen = []
    for i, (name, way) in enumerate(WAYS.items()):
        codecs = way.codecs or (OWN,)
        chosen.append((name, way.ranks[i % len(way.ranks)], codecs[i % len(codecs)]))
    return chosen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one case of each way")
    parser.add_argument("--way", help="the cases of this way alone")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    cases = quick_cases() if arguments.quick else every_case()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, result in run([case for case in cases if arguments.way in (None, case[0])]):
        known[name] = result
        print(json.dumps({name: result}), flush=True)
    if arguments.write:
        valid = {name: known[name] for name in map(name_of, every_case()) if name in known}
        FILE.write_text(json.dumps(valid, indent=0) + "\n")
