"""`ServerOptimizer`: mixed precision, parameters of 16 bits, and buffers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam

import runs
from gradwire.torch import ServerOptimizer
from gradwire.torch.options import grouped
from runs import Case, Run, said_by, sgd, threads
from training import batch, loss_of, make_model
from ways import Training, Way, build


def served(**options: Any) -> Way:
    return Way("server", {"codec": "3lc:s=1.5", "timeout": 20.0, **options}, servers=1)


def train_scaled(scale: float | None, spoiled: bool) -> tuple[list[Run], list[list[float]]]:
    """Six steps; in step 3 the gradient of worker 1 overflows. scale: None: without a GradScaler.
    Also returns the scales of each rank."""
    scales: list[list[float]] = [[], [], []]

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        overflows = spoiled and step == 3 and rank == 1
        return loss_of(module, rank, step) * (math.inf if overflows else 1.0)

    def note(training: Training) -> None:
        scales[training.rank].append(training.scaler.get_scale())

    after = dict.fromkeys(range(1, 7), note)
    case = Case(served(), after=after, scale=scale, loss=loss, model=make_model)
    return runs.run_one(3, case), scales


def test_a_scaler_changes_no_bit() -> None:
    """A power of two, so that scaling is exact."""
    plain, _ = train_scaled(None, False)
    scaled, scales = train_scaled(1024.0, False)
    assert scales[0] == [1024.0] * 6
    for one, other in zip(plain[:2], scaled[:2], strict=True):
        assert one.digests == other.digests


def test_a_version_that_overflows_on_one_worker_is_skipped_by_all() -> None:
    ranks, scales = train_scaled(1024.0, True)
    assert [rank.stats["skipped_versions"] for rank in ranks] == [1, 1, 1]
    assert ranks[0].digests == ranks[1].digests
    assert ranks[0].digests[3] == ranks[0].digests[2]
    assert ranks[0].digests[4] != ranks[0].digests[3]
    assert scales[0] == [1024.0] * 6  # each worker has its own
    assert scales[1] == [1024.0] * 3 + [512.0] * 3


@pytest.mark.parametrize("inner", [Adam, Adagrad])
def test_what_an_optimizer_keeps_in_16_bits_is_widened_too(inner: type[Adam | Adagrad]) -> None:
    """Adam has taken a step before; Adagrad has its sums at once."""

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum()

    def train(rank: int) -> set[torch.dtype]:
        model = nn.Linear(4, 4).bfloat16()
        optimizer = inner(model.parameters())
        loss(model).backward()
        optimizer.step()
        made = ServerOptimizer(optimizer, model=model)
        made.connect()
        if made.is_server:
            made.serve()
        else:
            loss(model).backward()
            made.step()
            made.close()
        return {kept.dtype for state in optimizer.state.values() for kept in state.values()}

    _, on_server = threads(2, train)
    assert on_server == {torch.float32}


def test_a_scaler_is_refused_tensor_by_tensor() -> None:
    case = Case(served(barrier="tensor"), scale=1024.0, model=make_model)
    said = threads(3, lambda rank: said_by(lambda: runs.run(case)))
    assert any("a GradScaler does not go with barrier='tensor'" in text for text in said), said


@pytest.mark.parametrize(
    ("dtype", "barrier"), [(torch.bfloat16, "step"), (torch.float16, "tensor")]
)
def test_parameters_of_16_bits_follow_changes_below_their_resolution(
    dtype: torch.dtype, barrier: str
) -> None:
    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, labels = batch(rank, 0)
        return nn.functional.cross_entropy(module(inputs.to(dtype)).float(), labels)

    before_close: dict[str, torch.Tensor] = {}

    def note(training: Training) -> None:
        if training.rank == 0:
            training.optimizer.synchronize()
            before_close.update({name: v.clone() for name, v in training.values().items()})
        else:
            training.settle()

    case = Case(
        served(codec="raw", barrier=barrier),
        partial(SGD, lr=1e-3),
        steps=40,
        after=dict.fromkeys(range(1, 41), note),
        loss=loss,
        model=partial(make_model, dtype),
    )
    *workers, server = runs.run_one(3, case)
    assert workers[0].digests == workers[1].digests
    last = workers[0].training.values()
    for name, exact in server.training.values().items():
        assert exact.dtype == torch.float32
        assert last[name].dtype == dtype
        assert torch.equal(last[name], exact.to(dtype))
        # Sums of 40 changes rounded to 16 bits each would differ in most values.
        equal = before_close[name] == exact.to(dtype)
        assert equal.float().mean() > 0.98, name


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(48, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return result

    @property
    def mean(self) -> torch.Tensor:
        assert self.norm.running_mean is not None
        return self.norm.running_mean

    @property
    def batches(self) -> float:
        assert self.norm.num_batches_tracked is not None
        return float(self.norm.num_batches_tracked)


@dataclass
class Normalizing:
    """What a rank has seen of the buffers."""

    model: Normalized
    first: float = 0.0  # of the means, after connect()
    batches: list[float] = field(default_factory=list)  # in each version
    mean: list[float] = field(default_factory=list)  # before the end


def train_normalized(path: Path, versions: int, resume: bool, rank: int) -> Normalizing:
    """The buffers are those of rank 1."""
    model = Normalized()
    model.mean.fill_(float(rank))  # connect() must replace it
    training = build(served(buffers_from=1, buffers_every=4), model, sgd)
    optimizer, seen, file = training.optimizer, Normalizing(model), path / f"{rank}.pt"
    if resume:
        optimizer.load_state_dict(torch.load(file, weights_only=True))
    optimizer.connect()
    seen.first = float(model.mean[0])

    def note(version: int) -> None:
        seen.batches.append(model.batches)
        seen.mean = model.mean.tolist()
        torch.save(optimizer.state_dict(), file)

    training.steps = optimizer.version
    training.run(versions - training.steps, loss_of, note)
    training.close()
    return seen


def test_one_worker_is_responsible_for_the_buffers(tmp_path: Path) -> None:
    *workers, server = threads(4, partial(train_normalized, tmp_path, 10, False))
    # All begin with the server's; it has rank 3.
    assert [rank.first for rank in (*workers, server)] == [3.0] * 4
    assert workers[1].batches == list(range(1, 11))
    # The server got them with the pushes for versions 0, 4 and 8.
    assert server.batches == [1.0] * 4 + [5.0] * 4 + [9.0] * 2
    # In the end all have the last ones of rank 1, which differ from what the others had.
    assert len({str(worker.mean) for worker in workers}) == 3
    for rank in (*workers, server):
        assert rank.model.mean.tolist() == workers[1].mean
        assert rank.model.batches == 10
    # A run that goes on begins with the buffers that the server saved: those of version 8.
    *workers, server = threads(4, partial(train_normalized, tmp_path, 12, True))
    assert workers[0].batches == [10.0, 11.0]
    assert server.first != 3.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"buffers_from": 0, "model": None}, "buffers_from needs model="),
    "rank": ({"buffers_from": 1}, "buffers_from is 1; the workers are ranks 0 to 0"),
    "every": ({"buffers_from": 0, "buffers_every": 0}, "buffers_every is 0; valid are 1 and more"),
}


def test_buffers_that_nobody_can_send_are_refused() -> None:
    def refuse(rank: int) -> None:
        model = Normalized()
        for arguments, words in REFUSED.values():
            with pytest.raises(ValueError, match=re.escape(words)):
                ServerOptimizer(sgd(model.parameters()), **grouped({"model": model} | arguments))

    threads(2, refuse)


def differ() -> None:
    model = Normalized() if dist.get_rank() else nn.Sequential(nn.Linear(48, 32))
    build(served(buffers_from=0), model, sgd).optimizer.connect()


def test_models_with_other_buffers_are_named() -> None:
    for said in threads(2, lambda rank: said_by(differ)):
        assert said.startswith("PeerMismatchError")
