"""Trainings whose gradients are looked at: what codecs make of them, and how they are distributed.

At some steps every tensor that is compressed is encoded with each observed codec, as worker 0 would
push it, without a residual, and the seconds of a core are counted that encoding and decoding take.
The training itself goes on with its own codec.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import gradwire
from gradwire_lab.evaluate import sz
from gradwire_lab.evaluate.found import Observed
from gradwire_lab.train import data, models, strategies
from gradwire_lab.train.loop import Trainer
from gradwire_lab.train.report import Conditions, Report, result_of
from gradwire_lab.train.run import describe_place
from gradwire_lab.train.settings import Run, TrainSettings
from gradwire_lab.train.strategy import Strategy

POINTS = 40  # steps that are looked at, evenly spaced
_BINS = 61
_WIDTH = 4.0  # of a histogram, in standard deviations to each side
_CLIP = 2.5  # TernGrad, section 3.3

Values = NDArray[np.float32]


def train_and_observe(settings: TrainSettings, codecs: tuple[str, ...]) -> dict[str, Any]:
    """The document of a run as `gradwire train --out` writes it, with an entry "observed"."""
    watching = _Watching(settings, codecs)
    given = data.load(settings.data, settings.data_dir)
    trainer = Trainer(settings, given, 0, None, torch.device(settings.device))
    run = Run(settings.codecs[0], settings.seed)
    records = trainer.run(run, lambda event: None, watching.choose)
    links = Conditions(shaped=False, modelled=False)
    parameters = watching.parameters
    result = result_of(settings, parameters, links, records)
    report = Report(settings, parameters, given.describe(), links, [result])
    return report.to_json(describe_place()) | {"observed": asdict(watching.observed())}


class _Watching:
    """Looks at the gradients of all workers, which are in one process."""

    def __init__(self, settings: TrainSettings, codecs: tuple[str, ...]) -> None:
        self._settings = settings
        points = min(POINTS, settings.steps)
        self._at = sorted({int((k + 0.5) * settings.steps / points) for k in range(points)})
        self._found: dict[str, dict[str, list[list[Any]]]] = {codec: {} for codec in codecs}
        self._histograms: dict[str, dict[str, list[float]]] = {}
        self._middle: list[list[Values]] = []  # of each worker, at the middle step
        self._shapes: dict[str, torch.Size] = {}  # of the tensors that are compressed
        self.parameters = 0

    def choose(
        self, model: nn.Module, codec: str, settings: TrainSettings, group: dist.ProcessGroup
    ) -> Strategy:
        """As strategies.choose; called by every worker."""
        strategy = strategies.choose(model, codec, settings, group)
        self.parameters = models.parameter_count(model)
        coded = {n: p for n, p in model.named_parameters() if is_coded(p, settings)}
        self._shapes = {name: parameter.shape for name, parameter in coded.items()}
        steps, rank = itertools.count(), dist.get_rank()

        def look(*_: object) -> None:
            if (step := next(steps)) in self._at:
                gradients = [flat_gradient(parameter) for parameter in coded.values()]
                self._look(rank, step, gradients)

        strategy.optimizer.register_step_pre_hook(look)
        return strategy

    def observed(self) -> Observed:
        tensors = [(name, shape.numel()) for name, shape in self._shapes.items()]
        return Observed(self._at, tensors, self._found, self._histograms)

    def _look(self, rank: int, step: int, gradients: list[Values]) -> None:
        if rank == 0:
            for codec, found in self._found.items():
                looked = [_try(codec, gradient, step) for gradient in gradients]
                for key in looked[0]:
                    found.setdefault(key, []).append([tensor[key] for tensor in looked])
        if step == self._at[len(self._at) // 2]:
            self._middle.append(gradients)
            if len(self._middle) == self._settings.workers:
                for index, name in self._largest().items():
                    own = [tensors[index] for tensors in self._middle]
                    self._histograms[name] = _histograms(next(iter(self._found)), own, step)

    def _largest(self) -> dict[int, str]:
        """The largest tensor of each number of dimensions, by its place."""
        best: dict[int, tuple[int, str]] = {}
        for index, (name, shape) in enumerate(self._shapes.items()):
            if len(shape) not in best or shape.numel() > self._shapes[best[len(shape)][1]].numel():
                best[len(shape)] = index, name
        return dict(best.values())


def is_coded(parameter: nn.Parameter, settings: TrainSettings) -> bool:
    """Whether the parameter is compressed, in a training that excludes none by name."""
    return parameter.dim() > 1 and parameter.numel() >= settings.min_numel


def flat_gradient(parameter: nn.Parameter) -> Values:
    assert parameter.grad is not None
    return parameter.grad.detach().flatten().cpu().numpy().copy()


def _decoded(codec: str, values: Values, step: int, worker: int = 0) -> tuple[bytes, Values]:
    if (bound := sz.bound_of(codec)) is not None:
        data = sz.encode(values, bound)
        return data, sz.decode(data, values.size)
    compressor = gradwire.Compressor(codec, values.size, seed=step, stream=worker)
    frame = compressor.encode(values, step)
    return frame, gradwire.decode(frame)


def _try(codec: str, values: Values, step: int) -> dict[str, Any]:
    began = time.thread_time()
    frame, decoded = _decoded(codec, values, step)
    seconds = time.thread_time() - began
    is_sz = sz.bound_of(codec) is not None
    described: dict[str, Any] = {"payload_bytes": len(frame)} if is_sz else gradwire.inspect(frame)
    square = float(np.square(values, dtype=np.float64).sum())
    error = float(np.square(values - decoded, dtype=np.float64).sum())
    tried: dict[str, Any] = {
        "density": _short(np.count_nonzero(decoded) / values.size),
        "error": _short(error / square if square else 0.0),
        "bits": _short(8 * described["payload_bytes"] / values.size),
        "seconds": _short(seconds),
    }
    if (shares := described.get("class_shares")) is not None:
        tried["class_shares"] = {name: _short(share) for name, share in shares.items()}
    return tried


def _histograms(codec: str, workers: list[Values], step: int) -> dict[str, list[float]]:
    gradient = workers[0]
    sigma = float(gradient.std()) or 1.0
    decoded = [_decoded(codec, values, step, worker)[1] for worker, values in enumerate(workers)]
    drawn = {
        "gradient": gradient,
        "clipped": np.clip(gradient, -_CLIP * sigma, _CLIP * sigma),
        "decoded": decoded[0],
        "average": np.mean(decoded, axis=0),
    }
    edges = np.linspace(-_WIDTH, _WIDTH, _BINS + 1)
    shares = {
        name: [_short(n / gradient.size) for n in np.histogram(values / sigma, edges)[0]]
        for name, values in drawn.items()
    }
    return {"edges": [_short(edge) for edge in edges]} | shares


def _short(number: float) -> float:
    return float(f"{number:.4g}")
