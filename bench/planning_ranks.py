"""What a rank of bench/planning.py does: it trains one model in several ways, which take turns."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from gradwire.torch import GradwireState, LocalSteps, ServerOptimizer, gradwire_hook
from gradwire_lab.plan.measure import KEPT_GRADIENTS, Gradients, gradients_of, measure_codec
from gradwire_lab.plan.meters import MessageMeter
from gradwire_lab.plan.predict import DDP
from gradwire_lab.plan.recorder import StepRecorder, without_exchange
from gradwire_lab.train import data, models
from gradwire_lab.train.settings import TrainSettings
from gradwire_lab.train.strategies import local_optimizer
from gradwire_lab.train.strategy import Strategy
from gradwire_lab.train.torch_ddp import distribute

ALONE = "alone"
CODECS = ("raw", "bf16", "3lc:s=1,coder=rice")
_STEPS = 2  # of a block, without local steps

# Index of a bucket, its tensors, and its values as they are exchanged.
Recorded = tuple[int, list[tuple[str, tuple[int, ...]]], Any]


@dataclass(frozen=True)
class Kind:
    """Which ways take turns: the hook, servers that average, or local steps."""

    servers: int = 0
    every: int = 1

    @property
    def ways(self) -> tuple[str, ...]:
        """Codecs stand for themselves in gradwire's exchange."""
        hooked = self.servers == 0 and self.every == 1
        return (ALONE, DDP, *CODECS) if hooked else (ALONE, *CODECS)

    @property
    def block(self) -> int:
        """Steps of a way until another one takes its turn."""
        return _STEPS if self.every == 1 else self.every

    @property
    def uncompressed(self) -> int:
        """First exchanges that go raw: the hook's, after which DDP makes other buckets."""
        return 1 if DDP in self.ways else 0


@dataclass
class Made:
    """A way: its strategy, the bytes that the rank has sent (with servers: pushed and pulled) in
    each step, and what it gave to the exchanges."""

    strategy: Strategy
    count_bytes: Callable[[], float] | None = None  # in the last step, or in all
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)


class Ways:
    """Makes the ways of a worker."""

    def __init__(
        self, settings: TrainSettings, kind: Kind, images: Any, workers: dist.ProcessGroup
    ) -> None:
        self._settings, self._kind = settings, kind
        self._shape, self._workers = images.shape, workers
        self.alone = self.build()
        self.messages = MessageMeter()
        self.recorder = StepRecorder(self.alone)

    def build(self) -> torch.nn.Module:
        settings = self._settings
        return models.build(settings.model, *self._shape, seed=0, width=settings.width, dropout=0.0)

    def make(self, way: str) -> Made:
        if way == ALONE:
            optimizer = local_optimizer(self.alone, self._settings)
            forward = without_exchange(self.alone, self._workers, self.messages.begin)
            return Made(Strategy(self.alone, optimizer, forward=forward))
        if self._kind.servers:
            return self._serve(way)
        if self._kind.every > 1:
            return self._step_locally(way)
        model = self.build()
        forward = distribute(model)
        optimizer = local_optimizer(model, self._settings)
        if way == DDP:
            return Made(Strategy(model, optimizer, forward=forward))
        return self._hook(way, model, optimizer, forward)

    def _hook(
        self, way: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, forward: Any
    ) -> Made:
        state = GradwireState(codec=way, start_iter=self._settings.start_iter)
        names = {parameter: name for name, parameter in model.named_parameters()}
        made = Made(Strategy(model, optimizer, state, forward))
        made.count_bytes = lambda: _last_bytes(made.strategy)

        def record_and_exchange(state: GradwireState, bucket: Any) -> Any:
            shapes = [(names[p], tuple(p.shape)) for p in bucket.parameters()]
            made.recorded.append((bucket.index(), shapes, bucket.buffer().numpy().copy()))
            return gradwire_hook(state, bucket)

        # DDP refuses annotations that are strings.
        forward.register_comm_hook(state, lambda state, bucket: record_and_exchange(state, bucket))
        return made

    def _serve(self, way: str) -> Made:
        model = self.build()
        optimizer = self.server_optimizer(way, model)
        optimizer.connect()
        made = Made(Strategy(model, optimizer))
        step = optimizer.step

        def record_and_step(closure: Any = None) -> Any:
            # The step writes the averages over the gradients.
            named = _named(model, optimizer)
            made.recorded.append((0, _shapes(named), _flat([p.grad for _, p in named])))
            return step(closure)

        optimizer.step = record_and_step  # type: ignore[method-assign]
        counted = 0.0

        def count() -> float:
            nonlocal counted
            stats, before = optimizer.stats(), counted
            counted = stats.push_bytes + stats.pull_bytes
            return counted - before

        made.count_bytes = count
        return made

    def server_optimizer(self, way: str, model: torch.nn.Module) -> ServerOptimizer:
        return ServerOptimizer(
            local_optimizer(model, self._settings),
            servers=self._kind.servers,
            named_parameters=model.named_parameters(),
            pulls="gradients",
            codec=way,
        )

    def _step_locally(self, way: str) -> Made:
        model = self.build()
        local = local_optimizer(model, self._settings)
        optimizer = LocalSteps(local, model, every=self._kind.every, codec=way)
        made = Made(Strategy(model, optimizer, optimizer))
        made.count_bytes = lambda: _last_bytes(made.strategy)

        def record(*_: Any) -> None:
            if (optimizer.local_steps + 1) % self._kind.every == 0:
                anchors, named = optimizer.anchors(), _named(model, local)
                changes = [anchors[name] - p.detach() for name, p in named]
                made.recorded.append((0, _shapes(named), _flat(changes)))

        local.register_step_post_hook(record)
        return made


def _last_bytes(strategy: Strategy) -> float:
    costs = strategy.last_costs()
    return costs.push_bytes + costs.pull_bytes if costs else 0.0


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """In the order in which gradwire exchanges them: that of the optimizer's groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [(names[p], p) for group in optimizer.param_groups for p in group["params"]]


def _shapes(named: list[tuple[str, Any]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in named]


def _flat(tensors: list[Any]) -> Any:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy()


def measure(settings: TrainSettings, kind: Kind, rank: int, rounds: int) -> dict[str, Any]:
    """Called by all ranks; those after settings.workers are the servers. Returns what a worker
    measured, as plain values and tensors."""
    images = data.load(settings.data, settings.data_dir)
    group = dist.new_group(list(range(settings.workers)))
    ways = Ways(settings, kind, images, group)
    if rank >= settings.workers:
        serve(ways, kind, rounds)
        return {}
    batches = images.batches(settings.batch, settings.workers, rank, settings.seed)
    made = {way: ways.make(way) for way in kind.ways}
    numbers = count()

    def take_step(way: str) -> None:
        inputs, targets = (torch.from_numpy(array) for array in batches.at(next(numbers)))
        made[way].strategy.take_step(inputs, targets).item()

    gradients: deque[Gradients] = deque(maxlen=KEPT_GRADIENTS)
    for _ in range(rounds):
        ways.messages.measure(partial(take_step, ALONE))
        for way, one in made.items():
            for _ in range(kind.block):
                dist.barrier()
                began = time.perf_counter()
                if way == ALONE:
                    with ways.recorder:
                        ways.recorder.begin_step()
                        take_step(way)
                        ways.recorder.end_step()
                else:
                    take_step(way)
                one.seconds.append(time.perf_counter() - began)
                if way == ALONE:
                    gradients.append(gradients_of(ways.alone))
                if one.count_bytes is not None:
                    one.sent.append(one.count_bytes())
    speeds = {}
    for codec in CODECS:
        dist.barrier()
        speeds[codec] = measure_codec(codec, list(gradients), group)
    messages = ways.messages.close()
    for one in made.values():
        if isinstance(one.strategy.optimizer, ServerOptimizer):
            one.strategy.optimizer.close()
        one.strategy.close()
    return {
        "seconds": {way: one.seconds for way, one in made.items()},
        "marks": ways.recorder.steps,
        "speeds": {codec: vars(speed) for codec, speed in speeds.items()},
        "messages": messages,
        "buckets": {
            way: [(index, shapes, torch.from_numpy(v)) for index, shapes, v in one.recorded]
            for way, one in made.items()
        },
        "sent": {way: one.sent for way, one in made.items()},
    }


def serve(ways: Ways, kind: Kind, rounds: int) -> None:
    """A server: of each way in a thread, while this thread keeps step with the workers."""
    threads = []
    for way in CODECS:
        optimizer = ways.server_optimizer(way, ways.build())
        optimizer.connect()
        threads.append(threading.Thread(target=optimizer.serve))
        threads[-1].start()
    for _ in range(rounds):
        ways.messages.measure(None)
        for _ in range(len(kind.ways) * kind.block):
            dist.barrier()
    for _ in CODECS:
        dist.barrier()
    ways.messages.close()
    for thread in threads:
        thread.join()
