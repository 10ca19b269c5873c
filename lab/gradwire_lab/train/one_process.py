"""The strategy `one-process`: all workers of a training and their server in one process.

In each step every worker computes the gradient of its own batch. What it pushes through its own
compressors is this gradient or, with `--compress updates`, the change that its own optimizer makes
of it. The server averages what arrives. With gradients it steps its optimizer, and what is pulled
is the change of its model; with `one-process:pulls=gradients` the average itself is pulled, and
every worker steps an equal optimizer by it, as with the hook. With updates their average is pulled.
The server encodes once for all workers, so one replica stands for the replicas of all.

Batches, codecs, residuals, frames and numbers of bytes are those of a training with servers.
Nothing is sent, so times say nothing about a network. Tensors of one dimension (batch
normalisation, biases) and small ones go raw. The statistics of batch normalisation are those of
worker 0 (3LC, section 4.3: "make one worker responsible").
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import gradwire
from gradwire._core import is_goal
from gradwire.advice import sends_coarsely
from gradwire.torch.device.kernels import has_kernels, require_kernels, stream_of
from gradwire.torch.optimizers.gradient_noise import (
    GradientNoise,
    average_norm,
    correct_changes,
    count_decay,
)
from gradwire.torch.optimizers.late_momentum import (
    LateMomentum,
    LocalMomentum,
    momentum_of_each,
    without_momentum,
)
from gradwire.torch.records.exchange_settings import RAW, ExchangeSettings
from gradwire.torch.records.optimizer_watch import describe_coarse_gradients
from gradwire.torch.records.parameters import split_like
from gradwire.torch.records.stats import ChosenCodec, bits
from gradwire_lab.auto_compressor import AutoCompressor, CompressorGroup
from gradwire_lab.train import optimizers
from gradwire_lab.train.records import StepCosts
from gradwire_lab.train.rivals import PLAIN_DDP
from gradwire_lab.train.settings import (
    GRADIENTS,
    SGD,
    SIMULATED,
    UPDATES,
    SettingsError,
    TrainSettings,
    both_ways,
)
from gradwire_lab.train.strategy import Strategy, seed_dropout

_BATCH_NORM_MOMENTUM = 0.1
_FRAME_HEADER = 32  # spec/format.md


class OneProcess(Strategy):
    """settings.every: steps from one push to the next. Between pushes gradients are summed, and the
    replica does not change (3LC's "local steps"); with updates every worker steps a model of its
    own, as LocalSteps. The codec ddp sends uncompressed gradients in every step."""

    def __init__(self, model: nn.Module, codec: str, settings: TrainSettings) -> None:
        is_plain = codec == PLAIN_DDP
        self._settings, self._workers, self._step = settings, settings.workers, 0
        self._every = 1 if is_plain else settings.every
        self._sends_updates = settings.compress == UPDATES and not is_plain
        self._pulls_gradient = SIMULATED[settings.exchange] == GRADIENTS
        excluded = _match(model, settings)
        self._replica = replica = FlatModel(
            model, settings.min_numel, {name for names in excluded.values() for name in names}
        )
        device = replica.weights.device
        self._gradients = replica.weights.new_zeros(self._workers, replica.weights.numel())
        self._views = [replica.views(gradient) for gradient in self._gradients]
        self._mean = torch.zeros_like(replica.weights)
        # The vectors that the optimizer steps, and their gradients.
        self._noises: list[GradientNoise] = []  # one of each worker, as in LocalSteps
        self._corrects = self._sends_updates and settings.optimizer != SGD
        if self._corrects or (self._sends_updates and settings.clip > 0.0):
            numels = [view.numel() for view in self._views[0]]
            self._noises = [GradientNoise(numels, self._workers) for _ in range(self._workers)]
        if self._sends_updates:
            self._models = replica.weights.repeat(self._workers, 1)
            self._pulled = replica.weights.clone()
            stepped = list(zip(self._models, self._gradients, strict=True))
        else:
            self._server = replica.weights if self._pulls_gradient else replica.weights.clone()
            self._pulled = replica.weights
            stepped = [(self._server, self._mean)]
        parts = [(replica.parameters(w), replica.parameters(g)) for w, g in stepped]
        for parameters, gradients in parts:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        matrices, vectors = ([parameters[i] for parameters, _ in parts] for i in range(2))
        super().__init__(model, optimizers.build(settings, matrices, vectors), clip=settings.clip)
        # By weight decay, since the last exchange: matrices of each worker, then vectors of each.
        self._kept = [1.0] * (2 * len(parts))
        self._momentum: LateMomentum | None = None  # as in LocalSteps
        self._local: LocalMomentum | None = None
        if self._corrects:
            betas = momentum_of_each(self.optimizer.param_groups)
            self._momentum = LateMomentum(betas[:1], [self._pulled])
            if self._every > 1:
                self._local = LocalMomentum(self._momentum, [self._models])

        segments = replica.segments()
        kind = DeviceCompressors if has_kernels(device) else Compressors
        less_often = f"To send less in all, exchange less often: --every {2 * self._every}"
        remedy = less_often if self._sends_updates else ""
        texts = (RAW, RAW) if is_plain else both_ways(codec)
        push, pull = (CompressorGroup(text, remedy) if is_goal(text) else text for text in texts)
        *self._pushes, self._pull = (
            kind(name, segments, settings.seed, sender, device)
            for sender, name in enumerate([*[push] * self._workers, pull])
        )
        ways = {"push": push, "pull": pull}
        self._choosers = {
            way: group.chooser for way, group in ways.items() if isinstance(group, CompressorGroup)
        }
        unmatched = [pattern for pattern, names in excluded.items() if not names]
        self._remarks = tuple(f"{pattern} in exclude matches no tensor" for pattern in unmatched)
        if not self._sends_updates and settings.optimizer != SGD and sends_coarsely(texts[0]):
            name = type(self.optimizer).__name__
            self._remarks += (describe_coarse_gradients(name, texts[0]),)
        self._values, self._compressed_values = sum(segments), sum(segments[:-1])
        # Row: pushed, pulled. Column: bytes of frames, bytes of the compressed tensors' payloads.
        self._last_bytes = self._sent_bytes = np.zeros((2, 2))

    def take_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: the batches of all workers, one after the other. Returns the mean of
        their losses."""
        batches = zip(inputs.chunk(self._workers), targets.chunk(self._workers), strict=True)
        losses = []
        for worker, batch in enumerate(batches):
            if self._sends_updates:
                self._replica.weights.copy_(self._models[worker])
            if self._settings.dropout > 0.0:
                seed_dropout(self._settings.seed, self._step, worker)
            views = self._views[worker]
            losses.append(self._replica.add_gradient(*batch, views, is_first=worker == 0))
        if self._sends_updates:
            self._step_workers()
        is_due = (self._step + 1) % self._every == 0
        self._last_bytes = self._exchange() if is_due else np.zeros((2, 2))
        if is_due or self._sends_updates:
            self._gradients.zero_()
        self._sent_bytes = self._sent_bytes + self._last_bytes
        self._step += 1
        return torch.stack(losses).mean()

    def last_costs(self) -> StepCosts:
        """Bytes that a worker pushes (mean over the workers), and bytes that each worker pulls."""
        return StepCosts(*self._last_bytes[:, 0].tolist())

    def stats(self) -> dict[str, Any]:
        (pushed, push_payloads), (pulled, pull_payloads) = self._sent_bytes.tolist()
        exchanges = self._step // self._every
        return {
            "steps": exchanges,
            "push_bytes": pushed,
            "pull_bytes": pulled,
            "compressed_bits_push": bits(push_payloads, exchanges * self._compressed_values),
            "compressed_bits_pull": bits(pull_payloads, exchanges * self._compressed_values),
            "control_bytes": 0,
            "values": self._values,
            "chosen": [
                asdict(replace(chosen, tensor=self._replica.names[int(chosen.tensor)]))
                for way, chooser in self._choosers.items()
                for chosen in ChosenCodec.of(chooser, way)
            ],
            "remarks": [
                *self._remarks,
                *(r for way, chooser in self._choosers.items() for r in chooser.remarks(way)),
            ],
        }

    def weights(self) -> list[Tensor]:
        """Those of the server's model; where there is none, of the replica."""
        return self._replica.in_order(self._pulled if self._sends_updates else self._server)

    def _step_workers(self) -> None:
        """Each worker steps its model by its own gradient, clipped by the norm of the average."""
        if self._clip > 0.0:
            for noise, gradient in zip(self._noises, self._views, strict=True):
                optimizers.clip(gradient, average_norm([noise], gradient), self._clip)
        before = [] if self._local is None else self._local.copy_parameters()
        if self._momentum is None:
            self.optimizer.step()
        else:
            with without_momentum(self.optimizer.param_groups):
                self.optimizer.step()
        if self._local is not None:
            self._local.go_on(before, self._step % self._every + 1)
        count_decay(self.optimizer, self._kept)

    def _step_server(self) -> Tensor:
        """Steps the server's model by the average gradient; returns its change."""
        before = self._server.clone()
        self._step_by_average()
        return self._server - before

    def _step_by_average(self) -> None:
        if self._clip > 0.0:
            optimizers.clip([self._mean], self._mean.norm().item(), self._clip)
        self.optimizer.step()

    def _changes(self) -> Tensor:
        """What the workers' optimizers have subtracted, a row for each worker, corrected for the
        noise of the gradients, as in LocalSteps."""
        changes = self._pulled - self._models if self._local is None else self._local.sums[0]
        anchors = self._replica.views(self._pulled)
        if self._corrects:
            kept = [self._kept[-1 if anchor.dim() <= 1 else 0] for anchor in anchors]
            for noise, change in zip(self._noises, changes, strict=True):
                correct_changes(self._replica.views(change), anchors, noise.gains(), kept)
        self._kept = [1.0] * len(self._kept)
        return changes

    def _exchange_sketches(self) -> int:
        """Lets the workers know the noise of this step's gradients, uncompressed. Returns the bytes
        of each push and pull."""
        if not self._noises:
            return 0
        sketches = self._gradients.new_zeros(self._workers, self._noises[0].numel)
        for noise, gradient, sketch in zip(self._noises, self._views, sketches, strict=True):
            noise.sketch(gradient, sketch)
        for noise in self._noises:
            noise.update(sketches.mean(dim=0))
        return sketches[0].nbytes

    def _exchange(self) -> NDArray[np.float64]:
        """Returns the bytes, as in _sent_bytes."""
        sent = self._changes() if self._sends_updates else self._gradients
        beside = self._exchange_sketches()
        self._mean.zero_()
        pushed = [
            push.transmit(values, self._step, self._mean)
            for push, values in zip(self._pushes, sent, strict=True)
        ]
        self._mean.div_(self._workers)
        pulled = self._pull_gradient() if self._pulls_gradient else self._pull_change()
        return np.array([np.mean(pushed, axis=0), pulled]) + np.array([beside, 0])

    def _pull_gradient(self) -> tuple[int, int]:
        """Every worker steps by the average as it arrives. Returns the bytes of the pull."""
        average = self._mean.clone()
        self._mean.zero_()
        pulled = self._pull.transmit(average, self._step, self._mean)
        self._step_by_average()
        return pulled

    def _pull_change(self) -> tuple[int, int]:
        """Every worker adds the change as it arrives. Returns the bytes of the pull."""
        change = self._mean if self._sends_updates else self._step_server()
        result = torch.zeros_like(self._pulled)
        pulled = self._pull.transmit(change, self._step, result)
        if self._momentum is not None:
            self._momentum.smooth([result], self._every)
        self._pulled.add_(result, alpha=-1.0 if self._sends_updates else 1.0)
        if self._sends_updates:
            self._models.copy_(self._pulled)
            self._replica.weights.copy_(self._pulled)
        if self._local is not None:
            self._local.restart()
        return pulled


def _match(model: nn.Module, settings: TrainSettings) -> dict[str, list[str]]:
    """The names that each pattern of the tensors to exclude matches."""
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    chosen = ExchangeSettings(RAW, exclude=settings.exclude, exclude_last=settings.exclude_last)
    chosen = chosen.with_last_excluded(shapes)
    patterns = [*chosen.exclude, *chosen.last_excluded]
    return {p: [name for name, _ in shapes if fnmatchcase(name, p)] for p in patterns}


class FlatModel:
    """A model whose parameters are views of one vector: the tensors to compress in their order,
    then other matrices, then the tensors of one dimension; both go raw."""

    def __init__(self, module: nn.Module, min_numel: int, excluded: Container[str] = ()) -> None:
        """Matrices of fewer values than min_numel go raw, and those whose names are excluded."""
        names = {parameter: name for name, parameter in module.named_parameters()}

        def place(parameter: nn.Parameter) -> tuple[bool, bool]:
            is_vector = parameter.dim() <= 1
            is_raw = parameter.numel() < min_numel or names[parameter] in excluded
            return is_vector or is_raw, is_vector

        self._given = list(module.parameters())
        self._parameters = parameters = sorted(self._given, key=place)  # stable
        self.names = [names[parameter] for parameter in parameters]  # those of segments() first
        self.module = module
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        for parameter, part in zip(parameters, self.views(self.weights), strict=True):
            parameter.data = part
        self._coded = [p.numel() for p in parameters if not any(place(p))]
        self._matrices = sum(p.numel() for p in parameters if not all(place(p)))
        self._norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]

    def segments(self) -> list[int]:
        """The length of each tensor to compress, then of all raw tensors together."""
        return [*self._coded, self.weights.numel() - sum(self._coded)]

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector like `weights`, each in its parameter's shape."""
        return split_like(vector, self._parameters)

    def in_order(self, vector: Tensor) -> list[Tensor]:
        """The same parts in the order of the module's parameters."""
        parts = dict(zip(self._parameters, self.views(vector), strict=True))
        return [parts[parameter] for parameter in self._given]

    def parameters(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of a vector like `weights` that are of matrices, and of one dimension."""
        return vector[: self._matrices], vector[self._matrices :]

    def add_gradient(
        self, inputs: Tensor, targets: Tensor, sums: list[Tensor], is_first: bool
    ) -> Tensor:
        """Adds the gradient of a batch to `sums`, the views of a vector; returns the loss.
        is_first: whether this worker keeps the statistics of batch normalisation."""
        for norm in self._norms:
            norm.momentum = _BATCH_NORM_MOMENTUM if is_first else 0.0
        for parameter, part in zip(self._parameters, sums, strict=True):
            parameter.grad = part
        loss = functional.cross_entropy(self.module(inputs), targets)
        loss.backward()
        return loss.detach()


class Compressors:
    """The compressors of one sender: one for each tensor to compress, one for the raw tensors."""

    def __init__(
        self,
        codec: str | CompressorGroup,
        segments: list[int],
        seed: int,
        sender: int,
        device: torch.device,
    ) -> None:
        """codec: a group if codecs are chosen at run time, for all senders of one direction."""
        assert device.type == "cpu"
        self._parts: list[gradwire.Compressor | AutoCompressor] = []
        for i, numel in enumerate(segments):
            draws: dict[str, Any] = {"seed": seed, "stream": sender * len(segments) + i}
            if i + 1 < len(segments) and isinstance(codec, CompressorGroup):
                self._parts.append(codec.compressor(str(i), numel, **draws))
            else:
                name = codec if i + 1 < len(segments) and isinstance(codec, str) else RAW
                self._parts.append(gradwire.Compressor(name, numel, **draws))
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
        self,
        codec: str | CompressorGroup,
        segments: list[int],
        seed: int,
        sender: int,
        device: torch.device,
    ) -> None:
        if isinstance(codec, CompressorGroup):
            raise SettingsError(
                "--codec", "auto chooses codecs on the CPU alone here: --device cpu"
            )
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
