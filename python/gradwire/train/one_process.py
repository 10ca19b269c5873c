"""The strategy `one-process`: all workers of a training and their server in one process.

In each step every worker computes the gradient of its own batch with the same replica of the model
and pushes it through its own compressors. The server averages the gradients that arrive, takes a
step of SGD, and sends the change of its model through its own compressors to the replica. All
workers would pull the same bytes, so one replica stands for the replicas of all workers.

Batches, codecs, residuals, frames and numbers of bytes are those of a training with servers.
Nothing is sent, so times say nothing about a network. Tensors of one dimension (batch
normalisation, biases) go raw. The statistics of batch normalisation are those of worker 0
(3LC, section 4.3: "make one worker responsible").
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import gradwire
from gradwire.torch.device.kernels import has_kernels, require_kernels, stream_of
from gradwire.torch.records.exchange_settings import RAW
from gradwire.torch.records.parameters import split_like
from gradwire.train.settings import MOMENTUM, WEIGHT_DECAY, TrainSettings
from gradwire.train.strategy import Strategy

_BATCH_NORM_MOMENTUM = 0.1
_FRAME_HEADER = 32  # spec/format.md


class OneProcess(Strategy):
    """`every`: steps from one push to the next. Between pushes the gradients are summed, and the
    replica does not change (3LC's "local steps")."""

    def __init__(self, model: nn.Module, codec: str, settings: TrainSettings) -> None:
        self._replica = FlatModel(model)
        self._server = self._replica.weights.clone().requires_grad_()
        rate = settings.learning_rate
        server_step = torch.optim.SGD([self._server], rate, MOMENTUM, weight_decay=WEIGHT_DECAY)
        super().__init__(model, server_step)
        self._workers, self._every, self._step = settings.workers, settings.every, 0
        segments, device = self._replica.segments(), self._server.device
        kind = DeviceCompressors if has_kernels(device) else Compressors
        *self._pushes, self._pull = (
            kind(codec, segments, settings.seed, sender, device)
            for sender in range(self._workers + 1)
        )
        self._gradients = torch.zeros(self._workers, self._server.numel(), device=device)
        self._views = [self._replica.views(gradient) for gradient in self._gradients]
        self._values = {"values": sum(segments), "compressed_values": sum(segments[:-1])}
        # Row: pushed, pulled. Column: bytes of frames, bytes of the compressed tensors' payloads.
        self._last_bytes = self._sent_bytes = np.zeros((2, 2))

    def take_step(self, images: Tensor, labels: Tensor) -> Tensor:
        """images, labels: the batches of all workers, one after the other. Returns the mean of
        their losses."""
        batches = zip(images.chunk(self._workers), labels.chunk(self._workers), strict=True)
        losses = [
            self._replica.add_gradient(*batch, self._views[worker], is_first=worker == 0)
            for worker, batch in enumerate(batches)
        ]
        is_due = (self._step + 1) % self._every == 0
        self._last_bytes = self._exchange() if is_due else np.zeros((2, 2))
        self._sent_bytes = self._sent_bytes + self._last_bytes
        self._step += 1
        return torch.stack(losses).mean()

    def sent_bytes(self) -> tuple[float, float]:
        """Bytes that a worker pushes (mean over the workers), and bytes that each worker pulls."""
        pushed, pulled = self._last_bytes[:, 0].tolist()
        return pushed, pulled

    def stats(self) -> dict[str, Any]:
        (pushed, push_payloads), (pulled, pull_payloads) = self._sent_bytes.tolist()
        return {
            "steps": self._step // self._every,
            "push_bytes": pushed,
            "pull_bytes": pulled,
            "push_payload_bytes": push_payloads,
            "pull_payload_bytes": pull_payloads,
            "control_bytes": 0,
            **self._values,
        }

    def snapshot(self) -> nn.Module:
        """The server's model, with the statistics of worker 0."""
        copied = FlatModel(copy.deepcopy(self._model))
        copied.weights.copy_(self._server.detach())
        return copied.module

    def _exchange(self) -> NDArray[np.float64]:
        """Returns the bytes, as in _sent_bytes."""
        mean = torch.zeros_like(self._gradients[0])
        pushed = [
            push.transmit(gradient, self._step, mean)
            for push, gradient in zip(self._pushes, self._gradients, strict=True)
        ]
        self._gradients.zero_()
        before = self._server.detach().clone()
        self._server.grad = mean.div_(self._workers)
        self.optimizer.step()
        change = self._server.detach() - before
        pulled = self._pull.transmit(change, self._step, self._replica.weights)
        return np.array([np.mean(pushed, axis=0), pulled])


class FlatModel:
    """A model whose parameters are views of one vector: the tensors to compress in their order,
    then the tensors of one dimension, which go raw."""

    def __init__(self, module: nn.Module) -> None:
        parameters = sorted(module.parameters(), key=lambda p: p.dim() == 1)  # stable
        self.module = module
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        self._parameters = parameters
        for parameter, part in zip(parameters, self.views(self.weights), strict=True):
            parameter.data = part
        self._norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]

    def segments(self) -> list[int]:
        """The length of each tensor to compress, then of all raw tensors together."""
        coded = [p.numel() for p in self._parameters if p.dim() != 1]
        return [*coded, self.weights.numel() - sum(coded)]

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector like `weights`, each in its parameter's shape."""
        return split_like(vector, self._parameters)

    def add_gradient(
        self, images: Tensor, labels: Tensor, sums: list[Tensor], is_first: bool
    ) -> Tensor:
        """Adds the gradient of a batch to `sums`, the views of a vector; returns the loss.
        is_first: whether this worker keeps the statistics of batch normalisation."""
        for norm in self._norms:
            norm.momentum = _BATCH_NORM_MOMENTUM if is_first else 0.0
        for parameter, part in zip(self._parameters, sums, strict=True):
            parameter.grad = part
        loss = functional.cross_entropy(self.module(images), labels)
        loss.backward()
        return loss.detach()


class Compressors:
    """The compressors of one sender: one for each tensor to compress, one for the raw tensors."""

    def __init__(
        self, codec: str, segments: list[int], seed: int, sender: int, device: torch.device
    ) -> None:
        assert device.type == "cpu"
        codecs = [codec] * (len(segments) - 1) + [RAW]
        self._parts = [
            gradwire.Compressor(name, numel, seed=seed, stream=sender * len(segments) + i)
            for i, (name, numel) in enumerate(zip(codecs, segments, strict=True))
        ]
        ends = np.cumsum(segments)
        self._places = [slice(end - n, end) for n, end in zip(segments, ends, strict=True)]

    def transmit(self, values: Tensor, step: int, sums: Tensor) -> tuple[int, int]:
        """Encodes `values` and adds the decoded values to `sums`. Returns the bytes of whole
        frames, and those of the payloads of the tensors to compress."""
        frames = [
            part.encode(values.numpy()[place], step)
            for part, place in zip(self._parts, self._places, strict=True)
        ]
        for frame, place in zip(frames, self._places, strict=True):
            gradwire.decode_into(frame, sums.numpy()[place], accumulate=True)
        payloads = [gradwire.inspect(frame)["payload_bytes"] for frame in frames[:-1]]
        return sum(map(len, frames)), sum(payloads)


class DeviceCompressors:
    """Compressors of one sender that use a GPU's kernels. They make the same bytes, which stay on
    the GPU; only their number is known here."""

    def __init__(
        self, codec: str, segments: list[int], seed: int, sender: int, device: torch.device
    ) -> None:
        kernels, coded = require_kernels(device), sum(segments[:-1])
        self._coded, self._raw = (
            kernels.DeviceCompressors(
                codec=text,
                lengths=lengths,
                offset=offset,
                draw_stream=sender * len(segments) + first,
                seed=seed,
                device=device.index or 0,
                stream=stream_of(device),
            )
            for text, lengths, offset, first in (
                (codec, segments[:-1], 0, 0),
                (RAW, segments[-1:], coded, len(segments) - 1),
            )
        )

    def transmit(self, values: Tensor, step: int, sums: Tensor) -> tuple[int, int]:
        """As Compressors.transmit."""
        assert values.dtype == sums.dtype == torch.float32
        assert values.is_contiguous()
        assert sums.is_contiguous()
        sent = [
            part.transmit(x=values.data_ptr(), step=step, sums=sums.data_ptr())
            for part in (self._coded, self._raw)
        ]
        if not all(finite for part in sent for _, finite in part):  # a marker decodes to that
            sums.fill_(torch.nan)
        coded, raw = ([size for size, _ in part] for part in sent)
        return sum(coded + raw) + _FRAME_HEADER * len(coded + raw), sum(coded)
