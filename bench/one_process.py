"""All workers of one training, and their server, in one process: 3LC without a network.

In each step every worker computes the gradient of its own batch with the same replica of the model
and pushes it through its own compressors; the server averages what arrives, takes a step of SGD and
sends its model's change through its compressors to the replica, which stands for those of all
workers: they pull the same bytes. Batches, codecs, residuals and frames are those of a real
training, and so are the numbers of bytes. Nothing is sent, so there is no time to be measured.

Batch normalisation: its statistics are those of worker 0 (3LC, section 4.3: "make one worker
responsible").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradwire
from gradwire.torch.device_codec import Scratch, SegmentCodec, Span, has_kernels
from gradwire.train import models
from gradwire.train.data import Batches, Data
from gradwire.train.schedule import learning_rate
from gradwire.train.settings import MOMENTUM, WEIGHT_DECAY

_EVALUATION_BATCH = 500
_LAST_STEPS = 20  # whose mean is the final loss
_BATCH_NORM_MOMENTUM = 0.1
_FRAME_HEADER = 32  # spec/format.md


@dataclass(frozen=True)
class Setting:
    """A training, but for the way its state changes are compressed. learning_rate: of one worker at
    step 0, see gradwire.train.schedule."""

    model: str
    steps: int
    workers: int
    batch: int
    learning_rate: float
    device: str


@dataclass(frozen=True)
class Outcome:
    """accuracy: of the server's model on the test images, a share; None: the loss was not finite
    any more. loss: the mean of all workers in the last steps. steps: taken. push_bits, pull_bits:
    of a value, worker and step, all inclusive. push_payload_bits, pull_payload_bits: without
    headers, of the values in compressed tensors alone."""

    accuracy: float | None
    loss: float
    steps: int
    push_bits: float
    pull_bits: float
    push_payload_bits: float
    pull_payload_bits: float


@dataclass
class Sent:
    """Bytes: of whole frames, and of the payloads of those that are not raw by rule."""

    frames: int = 0
    payloads: int = 0


class FlatModel:
    """A model whose parameters are views of one vector: tensors to compress first, in their order,
    then those of one dimension (batch normalisation, biases), which go raw."""

    def __init__(self, module: nn.Module) -> None:
        parameters = sorted(module.parameters(), key=lambda p: p.dim() == 1)  # stable
        self.module = module
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        self._parameters = parameters
        for parameter, part in zip(parameters, self._views(self.weights), strict=True):
            parameter.data = part
        self._norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]

    def segments(self) -> list[int]:
        """Lengths: of each tensor to compress, then of all that goes raw together."""
        coded = [p.numel() for p in self._parameters if p.dim() != 1]
        return [*coded, self.weights.numel() - sum(coded)]

    def add_gradient(
        self, images: Tensor, labels: Tensor, sum_: list[Tensor], is_first: bool
    ) -> float:
        """Adds the gradient of a batch to `sum_`, parameter by parameter (see gradient_views);
        returns the loss. is_first: whether this is the worker that keeps the statistics."""
        for norm in self._norms:
            norm.momentum = _BATCH_NORM_MOMENTUM if is_first else 0.0
        for parameter, part in zip(self._parameters, sum_, strict=True):
            parameter.grad = part
        loss = functional.cross_entropy(self.module(images), labels)
        loss.backward()
        return loss.item()

    def gradient_views(self, gradient: Tensor) -> list[Tensor]:
        """The parts of a vector like `weights`, each in its parameter's shape."""
        return self._views(gradient)

    def _views(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


class Compressors:
    """Those of one sender: one for each tensor to compress, and one for what goes raw."""

    def __init__(self, codec: str, segments: list[int], seed: int, sender: int) -> None:
        codecs = [codec] * (len(segments) - 1) + ["raw"]
        self._parts = [
            gradwire.Compressor(name, numel, seed=seed, stream=sender * len(segments) + i)
            for i, (name, numel) in enumerate(zip(codecs, segments, strict=True))
        ]
        ends = np.cumsum(segments)
        self._places = [slice(end - n, end) for n, end in zip(segments, ends, strict=True)]

    def transmit(self, values: Tensor, step: int, sums: Tensor, sent: Sent) -> None:
        """Adds to `sums` what arrives of `values`, and to `sent` what it took."""
        frames = [
            part.encode(values.numpy()[place], step)
            for part, place in zip(self._parts, self._places, strict=True)
        ]
        for frame, place in zip(frames, self._places, strict=True):
            gradwire.decode_into(frame, sums.numpy()[place], accumulate=True)
        sent.frames += sum(len(frame) for frame in frames)
        sent.payloads += sum(gradwire.inspect(frame)["payload_bytes"] for frame in frames[:-1])


class DeviceCompressors:
    """The same on a GPU, by its kernels: to the same bytes, which stay there and are counted."""

    def __init__(
        self, codec: str, segments: list[int], seed: int, sender: int, device: torch.device
    ) -> None:
        begins = [0, *np.cumsum(segments).tolist()]
        spans = [
            Span(begin, numel, sender * len(segments) + i)
            for i, (begin, numel) in enumerate(zip(begins, segments, strict=False))
        ]
        scratch = Scratch(device)
        self._coded, self._raw = (
            SegmentCodec(text, those, device, scratch, encodes=True)
            for text, those in ((codec, spans[:-1]), ("raw", spans[-1:]))
        )
        self._seed = seed
        dtype = self._coded.residual_dtype
        self._residual = (
            None if dtype is None else torch.zeros(begins[-1], dtype=dtype, device=device)
        )

    def transmit(self, values: Tensor, step: int, sums: Tensor, sent: Sent) -> None:
        for part, residual in ((self._coded, self._residual), (self._raw, None)):
            part.encode(values, residual, self._seed, step)
            part.decode(part.payloads, part.places(), sums, accumulate=True)
            if bool((part.encoded[:, 1] >= 0).any()):  # as a frame's marker decodes
                sums.fill_(torch.nan)
            sizes = part.encoded[:, 0]
            sent.frames += int((sizes + _FRAME_HEADER).sum())
            sent.payloads += int(sizes.sum()) if part is self._coded else 0


def train(
    setting: Setting,
    data: Data,
    codec: str,
    every: int,
    seed: int,
    on_step: Callable[[int, float], None],
) -> Outcome:
    """One training. every: steps from one push to the next; gradients are summed meanwhile (3LC's
    "local steps"). on_step is told the steps done and the mean loss of the workers."""
    workers, device = setting.workers, torch.device(setting.device)
    built = models.build(setting.model, data.channels, data.side, data.classes, seed)
    replica = FlatModel(built.to(device))
    segments = replica.segments()
    server = replica.weights.clone().requires_grad_()
    optimizer = torch.optim.SGD([server], lr=1.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

    def compressors(sender: int) -> Compressors | DeviceCompressors:
        if has_kernels(device):
            return DeviceCompressors(codec, segments, seed, sender, device)
        return Compressors(codec, segments, seed, sender)

    pushes = [compressors(worker) for worker in range(workers)]
    pull = compressors(workers)
    gradients = torch.zeros(workers, server.numel(), device=device)
    views = [replica.gradient_views(gradient) for gradient in gradients]
    # One permutation for all workers: each takes its part of every step's images.
    batches = Batches(data, setting.batch * workers, world=1, rank=0, seed=seed)
    pushed, pulled = Sent(), Sent()
    losses: list[float] = []
    for step in range(setting.steps):
        images, labels = (torch.from_numpy(array).to(device) for array in batches.at(step))
        parts = zip(images.chunk(workers), labels.chunk(workers), strict=True)
        loss = sum(
            replica.add_gradient(*part, views[worker], is_first=worker == 0)
            for worker, part in enumerate(parts)
        )
        losses.append(loss / workers)
        on_step(step + 1, losses[-1])
        if not math.isfinite(loss):
            break
        if (step + 1) % every:
            continue
        mean = torch.zeros_like(gradients[0])
        for push, gradient in zip(pushes, gradients, strict=True):
            push.transmit(gradient, step, mean, pushed)
        gradients.zero_()
        before = server.detach().clone()
        server.grad = mean.div_(workers)
        optimizer.param_groups[0]["lr"] = learning_rate(
            step, setting.steps, setting.learning_rate, workers
        )
        optimizer.step()
        pull.transmit(server.detach() - before, step, replica.weights, pulled)
    bits, coded_bits = (8 / (count * len(losses)) for count in (sum(segments), sum(segments[:-1])))
    return Outcome(
        accuracy=_accuracy(replica, server.detach(), data) if math.isfinite(losses[-1]) else None,
        loss=sum(losses[-_LAST_STEPS:]) / len(losses[-_LAST_STEPS:]),
        steps=len(losses),
        push_bits=pushed.frames / workers * bits,
        pull_bits=pulled.frames * bits,
        push_payload_bits=pushed.payloads / workers * coded_bits,
        pull_payload_bits=pulled.payloads * coded_bits,
    )


def _accuracy(replica: FlatModel, weights: Tensor, data: Data) -> float:
    """Share of right answers of the replica with the server's weights, which it keeps."""
    replica.weights.copy_(weights)
    model = replica.module.eval()
    right = 0
    with torch.inference_mode():
        for start in range(0, len(data.test), _EVALUATION_BATCH):
            part = slice(start, start + _EVALUATION_BATCH)
            pixels = torch.from_numpy(data.normalise(data.test.images[part]))
            answers = model(pixels.to(weights.device)).argmax(dim=1).cpu()
            right += int((answers == torch.from_numpy(data.test.labels[part])).sum())
    return right / len(data.test)
