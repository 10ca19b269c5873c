"""`ServerOptimizer`: mixed precision, parameters of 16 bits, and buffers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cluster import Cluster, Failed
from gradwire.torch import Execution, ServerOptimizer
from gradwire.torch.options import grouped
from runs import sgd, threads
from training import batch, digest, make_model


@dataclass
class Trained:
    digests: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    before_close: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def finish(optimizer: ServerOptimizer, model: nn.Module, trained: Trained) -> Trained:
    if not optimizer.is_server:
        optimizer.close()
    trained.skipped = optimizer.stats().skipped_versions
    trained.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return trained


def train_scaled(scale: float | None, spoiled: bool) -> Trained:
    """Six steps; in step 3 the gradient of worker 1 overflows. None: without a GradScaler."""
    model, trained = make_model(), Trained()
    optimizer = ServerOptimizer(
        sgd(model.parameters()), codec="3lc:s=1.5", execution=Execution(timeout=20.0)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return finish(optimizer, model, trained)
    while optimizer.version < 6:
        inputs, labels = batch(optimizer.rank, optimizer.version)
        overflows = spoiled and optimizer.version == 3 and optimizer.rank == 1
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss * (math.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        trained.losses.append(loss.item())
        trained.scales.append(scaler.get_scale())
        trained.digests.append(digest(model))
    return finish(optimizer, model, trained)


def test_a_scaler_changes_no_bit(cluster: Cluster) -> None:
    """A power of two, so that scaling is exact."""
    plain = cluster.run(3, train_scaled, None, False)
    scaled = cluster.run(3, train_scaled, 1024.0, False)
    assert scaled[0].scales == [1024.0] * 6
    for one, other in zip(plain[:2], scaled[:2], strict=True):
        assert one.digests == other.digests


def test_a_version_that_overflows_on_one_worker_is_skipped_by_all(cluster: Cluster) -> None:
    answers = cluster.run(3, train_scaled, 1024.0, True)
    assert [answer.skipped for answer in answers] == [1, 1, 1]
    assert answers[0].digests == answers[1].digests
    assert answers[0].digests[3] == answers[0].digests[2]
    assert answers[0].digests[4] != answers[0].digests[3]
    assert answers[0].scales == [1024.0] * 6  # each worker has its own
    assert answers[1].scales == [1024.0] * 3 + [512.0] * 3


def scale_tensor_by_tensor() -> None:
    model = make_model()
    local = sgd(model.parameters())
    optimizer = ServerOptimizer(local, model=model, barrier="tensor")
    scaler = torch.amp.GradScaler("cpu")
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return
    inputs, labels = batch(optimizer.rank, 0)
    scaler.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
    scaler.step(optimizer)


def test_a_scaler_is_refused_tensor_by_tensor(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, scale_tensor_by_tensor)
    answers = fragile_cluster.collect(range(3), seconds=60)
    said = [answer.message for answer in answers.values() if isinstance(answer, Failed)]
    assert any("a GradScaler does not go with barrier='tensor'" in text for text in said), said


def train_half(dtype: torch.dtype, barrier: str) -> Trained:
    model, trained = make_model(dtype), Trained()
    local = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = ServerOptimizer(
        local, model=model, codec="raw", barrier=barrier, execution=Execution(timeout=20.0)
    )
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return finish(optimizer, model, trained)
    inputs, labels = batch(optimizer.rank, 0)
    while optimizer.version < 40:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels)
        loss.backward()
        optimizer.step()
        trained.losses.append(loss.item())
        optimizer.synchronize()
        trained.digests.append(digest(model))
    trained.before_close = {name: p.detach().clone() for name, p in model.named_parameters()}
    return finish(optimizer, model, trained)


@pytest.mark.parametrize(
    ("dtype", "barrier"), [(torch.bfloat16, "step"), (torch.float16, "tensor")]
)
def test_parameters_of_16_bits_follow_changes_below_their_resolution(
    cluster: Cluster, dtype: torch.dtype, barrier: str
) -> None:
    *workers, server = cluster.run(3, train_half, dtype, barrier)
    assert workers[0].digests == workers[1].digests
    for name, exact in server.state.items():
        assert exact.dtype == torch.float32
        assert workers[0].state[name].dtype == dtype
        assert torch.equal(workers[0].state[name], exact.to(dtype))
        # Sums of 40 changes rounded to 16 bits each would differ in most values.
        equal = workers[0].before_close[name] == exact.to(dtype)
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


def train_normalized(path: str, versions: int, sender: int, resume: bool) -> Trained:
    model, trained = Normalized(), Trained()
    rank = dist.get_rank()
    model.mean.fill_(float(rank))  # connect() must replace it
    optimizer = ServerOptimizer(
        sgd(model.parameters()),
        model=model,
        buffers_from=sender,
        buffers_every=4,
        execution=Execution(timeout=20.0),
    )
    if resume:
        optimizer.load_state_dict(torch.load(f"{path}/{rank}.pt", weights_only=True))
    optimizer.connect()
    trained.losses.append(float(model.mean[0]))
    if optimizer.is_server:

        def note(version: int) -> None:
            trained.scales.append(model.batches)
            torch.save(optimizer.state_dict(), f"{path}/{rank}.pt")

        optimizer.serve(note)
        return finish(optimizer, model, trained)
    while optimizer.version < versions:
        inputs, labels = batch(rank, optimizer.version)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        trained.scales.append(model.batches)
    torch.save(optimizer.state_dict(), f"{path}/{rank}.pt")
    trained.digests.append(str(model.mean.tolist()))
    return finish(optimizer, model, trained)


def test_one_worker_is_responsible_for_the_buffers(cluster: Cluster, tmp_path: Any) -> None:
    *workers, server = cluster.run(4, train_normalized, str(tmp_path), 10, 1, False)
    # All begin with the server's; it has rank 3.
    assert [rank.losses[0] for rank in (*workers, server)] == [3.0] * 4
    assert workers[1].scales == list(range(1, 11))
    # The server got them with the pushes for versions 0, 4 and 8.
    assert server.scales == [1.0] * 4 + [5.0] * 4 + [9.0] * 2
    # In the end all have the last ones of rank 1, which differ from what the others had.
    assert len({worker.digests[0] for worker in workers}) == 3
    for rank in (*workers, server):
        assert str(rank.state["norm.running_mean"].tolist()) == workers[1].digests[0]
        assert int(rank.state["norm.num_batches_tracked"]) == 10
    # A run that goes on begins with the buffers that the server saved: those of version 8.
    *workers, server = cluster.run(4, train_normalized, str(tmp_path), 12, 1, True)
    assert workers[0].scales == [10.0, 11.0]
    assert server.losses[0] != 3.0


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
    local = sgd(model.parameters())
    ServerOptimizer(local, model=model, buffers_from=0, execution=Execution(timeout=20.0)).connect()


def test_models_with_other_buffers_are_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(2, differ)
    for answer in fragile_cluster.collect(range(2), seconds=60).values():
        assert isinstance(answer, Failed)
        assert "PeerMismatchError" in answer.message
