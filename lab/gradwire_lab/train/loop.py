"""One rank's part of a run, and its measurements.

The training clock starts and stops after a barrier of all ranks. It stands still while rank 0
evaluates and the other ranks wait in the next barrier. The counters of the network interface are
read at the same moments, so neither time nor bytes of an evaluation are in the results.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn import functional

from gradwire.errors import LimitError
from gradwire.torch import loopback
from gradwire.torch.optimizers.fragment import deal_layers
from gradwire_lab.train import devices, models, strategies
from gradwire_lab.train.barrier import Barrier, BarrierOfSurvivors
from gradwire_lab.train.data import Batches, Data, Images
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.network import Bytes, read_interface_bytes
from gradwire_lab.train.recipes import ACCURACY
from gradwire_lab.train.records import MetricValue, RankRecord
from gradwire_lab.train.schedule import learning_rate
from gradwire_lab.train.settings import Run, TrainSettings
from gradwire_lab.train.strategy import Strategy, seed_dropout
from gradwire_lab.train.text import Windows

Arrays = tuple[NDArray[Any], NDArray[Any]]  # inputs, targets
OnEvent = Callable[[dict[str, Any]], None]
ChooseStrategy = Callable[[nn.Module, str, TrainSettings, dist.ProcessGroup], Strategy]

_SECONDS_BETWEEN_STEP_EVENTS = 0.25


class TrainingClock:
    """Sums up the seconds, and an interface's bytes, between each start and the next stop."""

    def __init__(self, interface: str | None, device: torch.device, meeting: Barrier) -> None:
        """meeting: of the ranks that have such a clock."""
        self._interface, self._device, self._meeting = interface, device, meeting
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
        self._meeting.wait()
        counted = Bytes(0, 0) if self._interface is None else read_interface_bytes(self._interface)
        return time.perf_counter(), counted.sent, counted.received


class Trainer:
    """A rank's data and device, kept for all runs.

    A rank has one CPU thread, as all ranks share the machine. A process with all workers has as
    many as the settings say.
    """

    def __init__(
        self,
        settings: TrainSettings,
        data: Data,
        rank: int,
        interface: str | None,
        device: torch.device,
    ) -> None:
        if isinstance(data, Images):
            data = replace(data, augments=settings.augment == "crop-flip")
        self.settings, self._data, self._rank = settings, data, rank
        self._interface, self._device = interface, device
        self._threads = settings.threads if settings.in_one_process else 1
        # For evaluations, while all other ranks wait.
        self._cpus = settings.threads if settings.in_one_process else len(os.sched_getaffinity(0))
        torch.set_num_threads(self._threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Where workers meet of whom some may be gone (None: none may), and those that are.
        self.store: Store | None = None
        self.lost: set[int] = set()
        if not settings.is_server(rank):
            self._batches(settings)  # raises TrainError if there are too few data

    def measure_speed(self) -> dict[str, Any]:
        """Seconds of a step's computation and of one evaluation, for an estimate. Measuring takes
        the time of about five steps and changes nothing. Raises TrainError for more fragments than
        the model has layers, for more servers than it has tensors where each takes whole ones, and
        for a file of another model."""
        model = self._model(self.settings)
        try:  # here, before the runs without fragments take their time
            deal_layers(list(model.named_parameters()), self.settings.fragments)
        except ValueError as error:
            raise TrainError(f"--fragments: {error}") from None
        tensors = sum(1 for _ in model.parameters())
        if self.settings.barrier == "tensor" and self.settings.servers > tensors:
            raise TrainError(
                "--servers: with --barrier tensor a tensor lies whole on one server, and the model "
                f"has {tensors}: take {tensors} or fewer"
            )
        inputs, targets = self._to_device(self._batches(self.settings).at(0))

        def take_step() -> None:
            functional.cross_entropy(model(inputs), targets).backward()
            devices.wait_for(self._device)

        seconds = timeit.repeat(take_step, number=1, repeat=4)
        batches: Iterator[Arrays] = self._data.test_batches()
        sample = [next(batches)]
        evaluation = timeit.timeit(lambda: self._value(model, sample, self._threads), number=1)
        evaluation *= 1 + sum(1 for _ in batches)
        if self._device.type == "cpu":
            # All ranks of this machine measure at once, but rank 0 evaluates alone, on all CPUs.
            ranks = min(self.settings.processes, self.settings.workers)
            evaluation *= min(1.0, self._cpus / ranks / self._threads) * self._threads / self._cpus
        return {
            "parameters": models.parameter_count(model),
            "step_seconds": sorted(seconds[1:])[1] * self.settings.workers_here,
            "evaluation_seconds": evaluation,
        }

    def run(
        self, run: Run, on_event: OnEvent, choose: ChooseStrategy = strategies.choose
    ) -> list[RankRecord]:
        """Trains a new model; returns the records of the ranks in this process. Needs an
        initialised process group, unless all are here. Raises RuntimeError if a rank is gone."""
        settings = self.settings.of_run(run).of_ranks()
        if not self.settings.in_one_process:
            return [self._run(run, settings, on_event, choose)]

        def run_rank(rank: int) -> RankRecord:
            trainer = copy.copy(self)
            trainer._rank = rank
            tell = on_event if rank == 0 else lambda event: None
            return trainer._run(run, settings, tell, choose)

        return loopback.run(settings.ranks, run_rank)

    def _run(
        self, run: Run, settings: TrainSettings, on_event: OnEvent, choose: ChooseStrategy
    ) -> RankRecord:
        (codec,) = settings.codecs
        model = self._model(settings)
        # Each run has a new group, which all ranks, servers too, make together.
        group = dist.new_group(list(range(settings.workers)))
        record = RankRecord(run.codec, self._rank, seed=run.seed)
        if settings.is_server(self._rank):  # until the workers have left
            start = time.perf_counter()
            record.hook = strategies.serve(model, codec, settings)
            record.seconds = time.perf_counter() - start
            return record
        strategy = choose(model, codec, settings, group)
        strategy.loss_scale = settings.loss_scale
        try:
            meeting = Barrier(group)
            if self.store is not None and settings.can_lose_workers(run):
                own = PrefixStore(self.settings.title(run), self.store)
                meeting = BarrierOfSurvivors(own, self.lost, self._rank, settings.workers)
            self._train(model, settings, strategy, meeting, record, on_event)
        except RuntimeError as error:
            if (explained := strategy.explain(error)) is error:
                raise
            raise explained from error
        return record

    def _train(
        self,
        model: nn.Module,
        settings: TrainSettings,
        strategy: Strategy,
        meeting: Barrier,
        record: RankRecord,
        on_event: OnEvent,
    ) -> None:
        batches = self._batches(settings)
        average = Average(strategy.weights(), settings.ema) if settings.ema > 0.0 else None
        record.device = devices.describe(self._device)
        clock = TrainingClock(self._interface, self._device, meeting)
        last_event = -math.inf
        clock.start()
        done = 0
        while done < settings.steps:
            step = done
            for group in strategy.optimizer.param_groups:
                group["lr"] = learning_rate(settings, step)
            if settings.dropout > 0.0:
                seed_dropout(settings.seed, step, self._rank)
            try:
                loss = strategy.take_step(*self._to_device(batches.at(step))).item()
            except (RuntimeError, LimitError) as error:
                ended = error if isinstance(error, LimitError) else strategy.limit_error
                if ended is None:
                    raise
                record.failed = str(ended)
                clock.stop()
                break
            if average is not None and self._rank == 0:
                average.add(strategy.weights())
            done = strategy.steps_done(step)
            record.note(loss, clock.seconds, strategy.last_costs(), left_out=done - step - 1)
            if clock.seconds - last_event >= _SECONDS_BETWEEN_STEP_EVENTS:
                last_event = clock.seconds
                on_event(self._step_event(record, clock.seconds))
            is_over = done == settings.steps or (record.diverged and settings.workers == 1)
            if done == settings.steps:
                strategy.finish()
            if is_over or step // settings.eval_every < done // settings.eval_every:
                clock.stop()
                record.diverged = meeting.first(record.diverged)
                if record.diverged is not None:
                    break
                last = None
                if self._rank == 0:
                    weights = average.weights if average else strategy.weights()
                    snapshot = strategy.snapshot(weights)
                    value = self._value(snapshot, self._data.test_batches(), self._cpus)
                    on_event(self._step_event(record, clock.seconds) | {"value": value})
                    if math.isfinite(value):
                        record.evaluations.append(MetricValue(done, clock.seconds, value))
                        last = done if settings.metric.reached(value, settings.until) else None
                    else:
                        record.diverged = last = done
                if meeting.first(last) is not None:
                    break
                if done < settings.steps:
                    clock.start()
        record.seconds, record.link = clock.seconds, clock.link
        if not record.failed:
            strategy.finish()
        record.hook = strategy.stats()
        meeting.wait()  # no rank leaves before rank 0 has evaluated
        # One server may be a version ahead of another until close, and of a stale worker.
        differs_until_close = settings.backup_workers > 0 or settings.staleness > 0
        if not differs_until_close and not record.failed:  # a step that failed is half done
            record.parameters_digest = parameters_digest(model)
        strategy.close()
        if differs_until_close:
            record.parameters_digest = parameters_digest(model)
        is_whole = not record.failed and record.diverged is None
        if strategy.takes_over_servers_model and is_whole and self._rank == 0 and average is None:
            value = self._value(model, self._data.test_batches(), self._cpus)
            record.served = value if math.isfinite(value) else None

    def _batches(self, settings: TrainSettings) -> Batches | Windows:
        return self._data.batches(settings.batch, settings.workers, self._rank, settings.seed)

    def _model(self, settings: TrainSettings) -> nn.Module:
        model = models.build(
            settings.model,
            *self._data.shape,
            seed=settings.seed,
            width=settings.width,
            dropout=settings.dropout,
        )
        if settings.init is not None:
            models.load(model, settings.init)
        return model.to(self._device)

    def _to_device(self, batch: Arrays) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(array).to(self._device) for array in batch)
        return inputs, targets

    def _value(self, model: nn.Module, batches: Iterable[Arrays], threads: int) -> float:
        """The metric of the data, on the CPUs that the other ranks leave meanwhile. Leaves the
        model in evaluation mode."""
        model.eval()
        total, count = 0.0, 0
        torch.set_num_threads(threads)
        with torch.inference_mode():
            for batch in batches:
                inputs, targets = self._to_device(batch)
                logits = model(inputs)
                if self._data.metric is ACCURACY:
                    total += (logits.argmax(dim=1) == targets).sum().item()
                else:
                    total += functional.cross_entropy(logits, targets, reduction="sum").item()
                count += len(targets)
        torch.set_num_threads(self._threads)
        return total / count

    def _step_event(self, record: RankRecord, seconds: float) -> dict[str, Any]:
        return {
            "event": "step",
            "run": self.settings.title(Run(record.codec, record.seed)),
            "step": len(record.losses),
            "seconds": seconds,
            "loss": next((x for x in reversed(record.losses) if x is not None), math.nan),
        }


class Average:
    def __init__(self, weights: list[Tensor], decay: float) -> None:
        self.weights = [weight.clone() for weight in weights]
        self._decay, self._steps = decay, 0

    @torch.no_grad()
    def add(self, weights: list[Tensor]) -> None:
        """The first steps decay faster, so that the initial weights are soon forgotten."""
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        for mean, weight in zip(self.weights, weights, strict=True):
            mean.lerp_(weight, 1.0 - decay)


def parameters_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters: equal on all ranks if the replicas are."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
