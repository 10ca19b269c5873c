"""Trainings whose gradients are looked at: what codecs make of them, and how they are distributed.

At some steps every tensor that is compressed is encoded with each observed codec, as worker 0 would
push it, without a residual. The training itself goes on with its own codec.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import gradwire
from gradwire_lab.train import data, models
from gradwire_lab.train.loop import Trainer
from gradwire_lab.train.one_process import OneProcess
from gradwire_lab.train.report import Conditions, Report, result_of
from gradwire_lab.train.run import describe_place
from gradwire_lab.train.settings import Run, TrainSettings

POINTS = 40  # steps that are looked at, evenly spaced
_BINS = 61
_WIDTH = 4.0  # of a histogram, in standard deviations to each side
_CLIP = 2.5  # TernGrad, section 3.3

Values = NDArray[np.float32]


def train_and_observe(settings: TrainSettings, codecs: tuple[str, ...]) -> dict[str, Any]:
    """The document of a run as `gradwire train --out` writes it, with an entry "observed":

    steps      the steps that were looked at
    tensors    names, numel of those that are compressed
    codecs     for each codec, lists over steps of lists over tensors: density (share of the values
               that do not decode to 0), error (squared, relative to the squared norm), bits of a
               value, and class_shares where the codec has classes
    histograms for the largest tensor of each number of dimensions, at the middle step: edges in
               standard deviations, and shares of the values: of the gradient, clipped, decoded
               (first codec), and of the average of all workers' decoded values
    """
    watching: list[_Watching] = []

    def choose(model: nn.Module, codec: str, chosen: TrainSettings, _: object) -> OneProcess:
        watching.append(_Watching(model, codec, chosen, codecs))
        return watching[0]

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        given = data.load(settings.data, settings.data_dir)
        trainer = Trainer(settings, given, 0, None, torch.device(settings.device))
        run = Run(settings.codecs[0], settings.seed)
        record = trainer.run(run, lambda event: None, choose)
    finally:
        dist.destroy_process_group()
    (watched,) = watching
    links = Conditions(shaped=False, modelled=False)
    parameters = watched.parameters
    result = result_of(settings, parameters, links, [record])
    report = Report(settings, parameters, given.describe(), links, [result])
    return report.to_json(describe_place()) | {"observed": watched.observed()}


class _Watching(OneProcess):
    def __init__(
        self, model: nn.Module, codec: str, settings: TrainSettings, codecs: tuple[str, ...]
    ) -> None:
        super().__init__(model, codec, settings)
        self.parameters = models.parameter_count(model)
        points = min(POINTS, settings.steps)
        self._at = sorted({int((k + 0.5) * settings.steps / points) for k in range(points)})
        self._codecs = codecs
        *lengths, _ = self._replica.segments()
        self._ends = np.cumsum(lengths)
        self._names = self._replica.names[: len(lengths)]
        self._found: dict[str, dict[str, list[list[Any]]]] = {codec: {} for codec in codecs}
        self._histograms: dict[str, dict[str, list[float]]] = {}

    def observed(self) -> dict[str, Any]:
        lengths = np.diff(self._ends, prepend=0).tolist()
        return {
            "steps": self._at,
            "tensors": [list(pair) for pair in zip(self._names, lengths, strict=True)],
            "codecs": self._found,
            "histograms": self._histograms,
        }

    def _exchange(self) -> NDArray[np.float64]:
        if self._step in self._at:
            self._look()
        return super()._exchange()

    def _look(self) -> None:
        gradients = self._split(self._gradients[0])
        for codec, found in self._found.items():
            looked = [_try(codec, gradient, self._step) for gradient in gradients]
            for key in looked[0]:
                found.setdefault(key, []).append([tensor[key] for tensor in looked])
        if self._step == self._at[len(self._at) // 2]:
            workers = [self._split(gradient) for gradient in self._gradients]
            for index in self._largest():
                own = [tensors[index] for tensors in workers]
                self._histograms[self._names[index]] = _histograms(self._codecs[0], own, self._step)

    def _split(self, vector: torch.Tensor) -> list[Values]:
        return np.split(vector.cpu().numpy()[: self._ends[-1]], self._ends[:-1])

    def _largest(self) -> list[int]:
        """The largest tensor of each number of dimensions."""
        shapes = [view.shape for view in self._views[0][: len(self._names)]]
        best: dict[int, int] = {}
        for index, shape in enumerate(shapes):
            if len(shape) not in best or shape.numel() > shapes[best[len(shape)]].numel():
                best[len(shape)] = index
        return list(best.values())


def _decoded(codec: str, values: Values, step: int, worker: int = 0) -> tuple[bytes, Values]:
    compressor = gradwire.Compressor(codec, values.size, seed=step, stream=worker)
    frame = compressor.encode(values, step)
    return frame, gradwire.decode(frame)


def _try(codec: str, values: Values, step: int) -> dict[str, Any]:
    frame, decoded = _decoded(codec, values, step)
    described = gradwire.inspect(frame)
    square = float(np.square(values, dtype=np.float64).sum())
    error = float(np.square(values - decoded, dtype=np.float64).sum())
    tried = {
        "density": _short(np.count_nonzero(decoded) / values.size),
        "error": _short(error / square if square else 0.0),
        "bits": _short(8 * described["payload_bytes"] / values.size),
    }
    shares = described.get("class_shares")
    return (
        tried
        if shares is None
        else tried | {"class_shares": {k: _short(v) for k, v in shares.items()}}
    )


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
