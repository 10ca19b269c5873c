"""The same training in one process, in plain NumPy; the hook's ranks must equal it bit for bit.

It has its own 3LC quantization, residuals and sums, written from the description of the algorithm.
Only the cutting of buckets into segments, and their owners, come from gradwire's Layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gradwire._core import Layout
from training import NamedShapes, Options, batch, make_model, make_optimizer

F32 = np.float32


def quantize_3lc(x: np.ndarray, multiplier: float) -> np.ndarray:
    """The values that a receiver decodes from the 3LC frame of x."""
    scale = min(F32(multiplier) * np.max(np.abs(x)), np.finfo(F32).max)
    half = F32(scale) * F32(0.5)
    return np.where(x > half, F32(scale), np.where(x < -half, -F32(scale), F32(0)))


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(F32)


def transmit(x: np.ndarray, codec: str) -> np.ndarray:
    """The values that arrive for x."""
    name, _, parameters = codec.partition(":")
    if name == "raw":
        return x.copy()
    if name == "bf16":
        return round_to_bf16(x)
    settings = dict(part.split("=") for part in parameters.split(",") if part)
    return quantize_3lc(x, float(settings.get("s", 1.0)))


class Averaging:
    """The sharded exchange of all ranks at once."""

    def __init__(self, world_size: int, layout: dict[str, Any], start_iter: int) -> None:
        self._world_size = world_size
        self._layout = layout
        self._start_iter = start_iter
        # By parameter: each rank's push residual, the pull residual, and the owner of each element.
        self._push: list[dict[str, np.ndarray]] = [{} for _ in range(world_size)]
        self._pull: dict[str, np.ndarray] = {}
        self._owner: dict[str, np.ndarray] = {}

    def average(self, step: int, tensors: NamedShapes, gradients: list[np.ndarray]) -> np.ndarray:
        """The average of a bucket; `gradients[rank]` is that rank's whole bucket, float32."""
        if self._world_size == 1:
            return gradients[0]  # nothing is sent, so nothing is quantized
        if step < self._start_iter:
            segments = Layout(tensors, self._world_size, "raw").segments
        else:
            segments = Layout(tensors, self._world_size, **self._layout).segments
            self._change_owners(tensors, segments)
        result = np.empty_like(gradients[0])
        for segment in segments:
            begin = segment["bucket_offset"]
            place = slice(begin, begin + segment["numel"])
            result[place] = self._segment(segment, [gradient[place] for gradient in gradients])
        return result

    def _segment(self, segment: dict[str, Any], parts: Sequence[np.ndarray]) -> np.ndarray:
        place = slice(segment["tensor_offset"], segment["tensor_offset"] + segment["numel"])
        keeps = [
            codec.startswith("3lc") for codec in (segment["push_codec"], segment["pull_codec"])
        ]
        total = parts[segment["owner"]].copy()
        for rank, part in enumerate(parts):
            if rank == segment["owner"]:
                continue
            residual = self._push[rank][segment["name"]][place] if keeps[0] else None
            arrived = _send(part, residual, segment["push_codec"])
            # Adding a 3LC frame leaves elements alone whose trit is 0: -0.0 stays -0.0.
            np.add(total, arrived, out=total, where=(arrived != 0) | (not keeps[0]))
        mean = total / F32(self._world_size)
        residual = self._pull[segment["name"]][place] if keeps[1] else None
        return _send(mean, residual, segment["pull_codec"])

    def _change_owners(self, tensors: NamedShapes, segments: list[dict[str, Any]]) -> None:
        """Moves residuals of elements with a new owner, so that their mean over the ranks stays."""
        world = F32(self._world_size)
        for name, shape in tensors:
            numel = int(np.prod(shape))
            owner = np.full(numel, -1)
            for segment in segments:
                if segment["name"] == name:
                    first = segment["tensor_offset"]
                    owner[first : first + segment["numel"]] = segment["owner"]
            if name not in self._owner:
                for residuals in (*self._push, self._pull):
                    residuals[name] = np.zeros(numel, F32)
            elif np.any(before := self._owner[name] != owner):
                pull = np.zeros(numel, F32)
                for rank, push in enumerate(self._push):
                    left = before & (self._owner[name] == rank)
                    came = before & (owner == rank)
                    push[name][left] = self._pull[name][left] * world
                    pull[came] = push[name][came] * (F32(1) / world)
                    push[name][came] = 0
                self._pull[name] = np.where(before, pull, self._pull[name])
            self._owner[name] = owner


def _send(x: np.ndarray, residual: np.ndarray | None, codec: str) -> np.ndarray:
    """The values that arrive for x plus `residual`, which then holds the difference."""
    if residual is None:
        return transmit(x, codec)
    wanted = x + residual
    arrived = transmit(wanted, codec)
    residual[:] = wanted - arrived
    return arrived


def simulate(
    world_size: int,
    options: Options,
    layout: dict[str, Any],
    start_iter: int,
    buckets: list[list[NamedShapes]],
) -> dict[str, np.ndarray]:
    """The parameters after the training that `training.train` runs with these options.

    `layout`: arguments of Layout beside tensors and world size. `buckets[step]`: how DDP cut the
    gradients in that step.
    """
    model = make_model()
    optimizer = make_optimizer(model)
    averaging = Averaging(world_size, layout, start_iter)
    for step in range(options.steps):
        gradients = [_gradients(model, rank, step, options) for rank in range(world_size)]
        averages: dict[str, np.ndarray] = {}
        for tensors in buckets[step]:
            flat = [np.concatenate([own[name].ravel() for name, _ in tensors]) for own in gradients]
            mean = averaging.average(step, tensors, flat)
            end = 0
            for name, shape in tensors:
                begin, end = end, end + int(np.prod(shape))
                averages[name] = mean[begin:end].reshape(shape)
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(averages[name].copy())
        optimizer.step()
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def _gradients(model: nn.Module, rank: int, step: int, options: Options) -> dict[str, np.ndarray]:
    model.zero_grad()
    for micro in range(options.micro_batches):
        inputs, labels = batch(rank, step, micro)
        output = model(inputs, step % options.branch_every == 0)
        nn.functional.cross_entropy(output, labels).backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy().copy()
        for name, p in model.named_parameters()
    }
