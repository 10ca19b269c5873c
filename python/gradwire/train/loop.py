"""One rank's training run with one codec, and its measurements.

The training clock starts and stops after a barrier of all ranks. It stands still while rank 0
evaluates and the other ranks wait in the next barrier. The counters of the network interface are
read at the same moments, so neither time nor bytes of an evaluation are in the results.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from gradwire.train import devices, models, strategies
from gradwire.train.data import Batches, Data, ImageSet
from gradwire.train.errors import DivergedError
from gradwire.train.network import Bytes, read_interface_bytes
from gradwire.train.records import Evaluation, RankRecord
from gradwire.train.schedule import learning_rate
from gradwire.train.settings import ONE_PROCESS, TrainSettings
from gradwire.train.strategy import Strategy

OnEvent = Callable[[dict[str, Any]], None]
ChooseStrategy = Callable[[nn.Module, str, TrainSettings, dist.ProcessGroup], Strategy]

_EVALUATION_BATCH = 250
_SECONDS_BETWEEN_STEP_EVENTS = 0.25


class TrainingClock:
    """Sums up the seconds, and an interface's bytes, between each start and the next stop."""

    def __init__(
        self, interface: str | None, device: torch.device, workers: dist.ProcessGroup | None
    ) -> None:
        """workers: the ranks that have such a clock; None: all."""
        self._interface = interface
        self._device = device
        self._workers = workers
        # Seconds, bytes sent, bytes received. While the clock runs, its start is subtracted.
        self._total = np.zeros(3)
        self._runs = False

    def start(self) -> None:
        self._total -= self._wait_and_read()
        self._runs = True

    def stop(self) -> None:
        self._total += self._wait_and_read()
        self._runs = False

    @property
    def seconds(self) -> float:
        return float(self._total[0]) + (time.perf_counter() if self._runs else 0.0)

    @property
    def link(self) -> Bytes | None:
        return None if self._interface is None else Bytes(*map(int, self._total[1:]))

    def _wait_and_read(self) -> tuple[float, int, int]:
        devices.wait_for(self._device)
        dist.barrier(self._workers)
        counted = Bytes(0, 0) if self._interface is None else read_interface_bytes(self._interface)
        return time.perf_counter(), counted.sent, counted.received


class Trainer:
    """A rank's data and device, kept for all codecs.

    A rank has one CPU thread, as all ranks share the machine. A process with all workers has all
    CPUs.
    """

    def __init__(
        self,
        settings: TrainSettings,
        data: Data,
        rank: int,
        interface: str | None,
        device: torch.device,
    ) -> None:
        self._cpus = len(os.sched_getaffinity(0))
        self._threads = self._cpus if settings.exchange == ONE_PROCESS else 1
        torch.set_num_threads(self._threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._device = device
        self.settings = settings
        self._data = data
        self._rank = rank
        self._interface = interface
        if not settings.is_server(rank):
            ranks = settings.worker_ranks
            batch = settings.batch * settings.workers // ranks
            self._batches = Batches(data, batch, ranks, rank, settings.seed)

    def measure_speed(self) -> dict[str, Any]:
        """Seconds of a step's computation and of one evaluation, for an estimate. Measuring takes
        the time of about five steps and changes nothing."""
        model = self._model()
        images, labels = self._batch(0)

        def take_step() -> None:
            functional.cross_entropy(model(images), labels).backward()
            devices.wait_for(self._device)

        seconds = timeit.repeat(take_step, number=1, repeat=4)
        sample = ImageSet(
            self._data.test.images[:_EVALUATION_BATCH], self._data.test.labels[:_EVALUATION_BATCH]
        )
        evaluation = timeit.timeit(lambda: self._accuracy(model, sample, self._threads), number=1)
        evaluation *= len(self._data.test) / len(sample)
        if self._device.type == "cpu":
            # All ranks of this machine measure at once, but rank 0 evaluates alone, on all CPUs.
            ranks = self.settings.worker_ranks
            evaluation *= min(1.0, self._cpus / ranks / self._threads) * self._threads / self._cpus
        return {
            "parameters": models.parameter_count(model),
            "step_seconds": sorted(seconds[1:])[1],
            "evaluation_seconds": evaluation,
        }

    def run(
        self, codec: str, on_event: OnEvent, choose: ChooseStrategy = strategies.choose
    ) -> RankRecord:
        """Trains a new model. Needs an initialised process group.

        Raises DivergedError, and RuntimeError if a rank is gone.
        """
        model, settings = self._model(), self.settings
        # Each run has a new group, which all ranks, servers too, make together.
        group = dist.new_group(list(range(settings.worker_ranks)))
        if settings.is_server(self._rank):  # until the workers have left
            start = time.perf_counter()
            stats = strategies.serve(model, codec, settings)
            return RankRecord(codec, self._rank, time.perf_counter() - start, hook=stats)
        strategy = choose(model, codec, settings, group)
        try:
            return self._train(model, codec, strategy, group, on_event)
        except RuntimeError as error:
            explained = strategy.explain(error)
            if explained is error:
                raise
            raise explained from error

    def _train(
        self,
        model: nn.Module,
        codec: str,
        strategy: Strategy,
        workers: dist.ProcessGroup,
        on_event: OnEvent,
    ) -> RankRecord:
        settings = self.settings
        record = RankRecord(codec, self._rank, device=devices.describe(self._device))
        clock = TrainingClock(self._interface, self._device, workers)
        last_event = -math.inf
        clock.start()
        done = 0
        while done < settings.steps:
            step = done
            rate = learning_rate(step, settings.steps, settings.learning_rate, settings.workers)
            for group in strategy.optimizer.param_groups:
                group["lr"] = rate
            loss = strategy.take_step(*self._batch(step)).item()
            if not math.isfinite(loss):
                raise DivergedError(
                    f"the loss of {codec} is {loss} at step {step} on rank {self._rank}; "
                    f"a smaller --lr may help (now {settings.learning_rate:g})"
                )
            done = strategy.steps_done(step)
            record.note(loss, strategy.sent_bytes(), left_out=done - step - 1)
            if clock.seconds - last_event >= _SECONDS_BETWEEN_STEP_EVENTS:
                last_event = clock.seconds
                on_event(_step_event(record, clock.seconds))
            if done == settings.steps or step // settings.eval_every < done // settings.eval_every:
                clock.stop()
                if self._rank == 0:
                    self._evaluate(strategy.snapshot(), record, clock.seconds, on_event)
                if done < settings.steps:
                    clock.start()
        record.seconds = clock.seconds
        record.link = clock.link
        record.hook = strategy.stats()
        dist.barrier(workers)  # no rank leaves before rank 0 has evaluated
        if settings.backup_workers == 0:
            record.parameters_digest = parameters_digest(model)
        strategy.close()
        if settings.backup_workers > 0:
            # One server may be a version ahead of another until close.
            record.parameters_digest = parameters_digest(model)
        return record

    def _model(self) -> nn.Module:
        data, settings = self._data, self.settings
        model = models.build(settings.model, data.channels, data.side, data.classes, settings.seed)
        return model.to(self._device)

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self._batches.at(step)
        return torch.from_numpy(images).to(self._device), torch.from_numpy(labels).to(self._device)

    def _evaluate(
        self, model: nn.Module, record: RankRecord, seconds: float, on_event: OnEvent
    ) -> None:
        """Evaluates with all CPUs, as the other ranks wait meanwhile."""
        accuracy = self._accuracy(model, self._data.test, self._cpus)
        record.evaluations.append(Evaluation(len(record.losses), seconds, accuracy))
        on_event(_step_event(record, seconds) | {"accuracy": accuracy})

    def _accuracy(self, model: nn.Module, images: ImageSet, threads: int) -> float:
        """The share of correct answers. Leaves the model in evaluation mode."""
        model.eval()
        right = 0
        torch.set_num_threads(threads)
        with torch.inference_mode():
            for start in range(0, len(images), _EVALUATION_BATCH):
                part = slice(start, start + _EVALUATION_BATCH)
                pixels = torch.from_numpy(self._data.normalise(images.images[part]))
                answers = model(pixels.to(self._device)).argmax(dim=1).cpu()
                right += int((answers == torch.from_numpy(images.labels[part])).sum())
        torch.set_num_threads(self._threads)
        return right / len(images)


def parameters_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters: equal on all ranks if the replicas are."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _step_event(record: RankRecord, seconds: float) -> dict[str, Any]:
    return {
        "event": "step",
        "codec": record.codec,
        "step": len(record.losses),
        "seconds": seconds,
        "loss": next(loss for loss in reversed(record.losses) if loss is not None),
    }
