"""What a ServerOptimizer refuses, what it shares with the wrapped optimizer, and the example."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from cluster import Cluster, free_port, started_by_torchrun
from gradwire.torch import Compression, ServerOptimizer
from gradwire.torch.errors import CommunicationError, UnmatchedPatternWarning
from gradwire.torch.options import grouped
from runs import said_by, sgd, threads

REPOSITORY = Path(__file__).parents[2]

ELASTIC: dict[str, Any] = {
    "on_lost": "continue",
    "store": HashStore(),
    "ranks": 3,
    "role": "worker",
}
PAIRS = "in it; pairs of a name and a tensor are needed, as model.named_parameters() gives them"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"codec": "3cl"}, gradwire.GradwireError, "3lc"),
    ({"servers": 0}, ValueError, "servers is 0; a world of 3 ranks has 1 to 2 servers"),
    ({"servers": 3}, ValueError, "servers is 3"),
    ({"on_lost": "wait"}, ValueError, "on_lost is 'wait'; valid are 'stop' and 'continue'"),
    (
        {"on_lost": "continue", "pulls": "gradients"},
        ValueError,
        "on_lost='continue' needs pulls='updates'",
    ),
    ({"ranks": 3, "role": "worker"}, ValueError, "ranks= and role= are for ranks that come and"),
    ({**ELASTIC, "store": None}, ValueError, "ranks= and role=: processes can join with store="),
    ({**ELASTIC, "role": "boss"}, ValueError, "role is 'boss'; valid are 'worker' and 'server'"),
    ({**ELASTIC, "store": "host:29500"}, TypeError, "store is 'host:29500'; a store of torch"),
    ({**ELASTIC, "lost_after": 0.0}, ValueError, "lost_after is 0.0; it is a number of seconds"),
    ({**ELASTIC, "ranks": 1}, ValueError, "servers is 1; a world of 1 ranks has 1 to 0 servers"),
    ({**ELASTIC, "min_ranks": 2}, ValueError, "min_ranks=2 is for LocalSteps"),
    ({"ranks_per_machine": 1}, ValueError, "ranks_per_machine is for exchange='hierarchical'"),
    ({"backup_workers": 2}, gradwire.GradwireError, "2 backup workers of 2 workers"),
    ({"staleness": 64}, gradwire.GradwireError, "a history of 64 versions is too short"),
    ({"timeout": 0.0}, ValueError, "timeout is 0"),
    ({"exclude_last": 1}, ValueError, "exclude_last needs the names: give named_parameters= or"),
    ({"named_parameters": nn.Linear(300, 4).parameters()}, TypeError, f"has a Parameter {PAIRS}"),
    ({"named_parameters": {"weight": 3}}, TypeError, f"named_parameters has a str {PAIRS}"),
    ({"named_parameters": [("weight", 3)]}, TypeError, f"named_parameters has a tuple {PAIRS}"),
    ({"named_parameters": []}, ValueError, "parameter 0 of group 0 is not among"),
]


def refuse() -> None:
    model = nn.Linear(300, 4)
    for arguments, error, message in REFUSED:
        with pytest.raises(error, match=re.escape(message)):
            ServerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **grouped(arguments))
    with pytest.raises(TypeError, match=r"the first argument is the optimizer, .* is a Linear"):
        ServerOptimizer(model)  # type: ignore[arg-type]
    double = torch.optim.SGD(nn.Linear(3, 3).double().parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"bfloat16, float16 parameters are exchanged; 0\.0 is torch\.float64"
    ):
        ServerOptimizer(double)
    with pytest.warns(UnmatchedPatternWarning, match=r"'weigth'") as caught:
        ServerOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), compression=Compression(exclude=["weigth"])
        )
    assert [one.filename for one in caught] == [__file__], "not the decorator that checks arguments"


def share() -> None:
    """Groups and schedulers are the local optimizer's. Each side refuses the other's calls."""
    model = nn.Linear(300, 4)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "lr": 0.5},
    ]
    local = torch.optim.Adam(groups, lr=0.1)
    of_local = torch.optim.lr_scheduler.StepLR(local, 1, 1.0)
    optimizer = ServerOptimizer(local, codec="raw")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert optimizer.param_groups is local.param_groups
    optimizer.connect()
    optimizer.connect()  # does nothing
    with pytest.raises(RuntimeError, match=r"before connect\(\)"):
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="takes no further parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if optimizer.is_server:
        with pytest.raises(RuntimeError, match="rank 2 is a server"):
            optimizer.step()
        optimizer.serve()
        assert [group["lr"] for group in local.param_groups] == [0.05, 0.25]  # of the last push
        assert local.state[model.weight]["step"] == 2
    else:
        with pytest.raises(RuntimeError, match=f"rank {optimizer.rank} is a worker"):
            optimizer.serve()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 300)).square().sum()
            loss.backward()
            return loss

        losses = []
        while optimizer.version < 2:
            losses.append(optimizer.step(closure).item())
            scheduler.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # such as: no step came before that of the scheduler
                of_local.step()
        assert losses[1] != losses[0]
        assert not local.state  # it lives on the server
        optimizer.close()
        with pytest.raises(RuntimeError, match="was closed"):
            optimizer.step()
    assert repr(optimizer).startswith("ServerOptimizer(Adam")


def save_and_load() -> int:
    """A worker's residuals and a server's model are loaded; returns the number of owed values."""
    torch.manual_seed(0)
    model = nn.Linear(300, 40)
    optimizer = ServerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
    else:
        while optimizer.version < 2:
            model(torch.randn(2, 300)).square().sum().backward()
            optimizer.step()
        optimizer.close()
    saved = optimizer.state_dict()
    again = nn.Linear(300, 40)
    loaded = ServerOptimizer(torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9))
    loaded.load_state_dict(saved)
    assert loaded.version == 2
    assert loaded.param_groups[0]["lr"] == 0.1
    found = loaded.state_dict()
    if loaded.is_server:
        assert torch.equal(again.weight, model.weight)
        momentum = found["state"][0]["momentum_buffer"]
        assert torch.equal(momentum, saved["state"][0]["momentum_buffer"])
        return 1
    (owed,), (expected,) = found["gradwire"]["residuals"], saved["gradwire"]["residuals"]
    assert owed["name"] == expected["name"] == "0.0"
    assert torch.equal(owed["values"], expected["values"])
    saved["gradwire"]["rank"] += 1
    with pytest.raises(ValueError, match=f"this is rank {loaded.rank} of 3"):
        loaded.load_state_dict(saved)
    return int(owed["values"].count_nonzero())


def refuse_sparse_gradients() -> str:
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ServerOptimizer(sgd, named_parameters=model.named_parameters())
    optimizer.connect()
    try:
        if optimizer.is_server:
            optimizer.serve()
        model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        optimizer.step()
    except (TypeError, CommunicationError) as error:
        return str(error)
    return "exchanged"


def connect_late(differ: bool) -> str:
    torch.manual_seed(dist.get_rank() if differ else 0)
    model = nn.Linear(300, 4)
    optimizer = ServerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if optimizer.is_server:
        with warnings.catch_warnings():
            optimizer.serve()
        return "served"
    model(torch.ones(2, 300)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        optimizer.close()
        return str(error)
    optimizer.close()
    return "stepped"


def test_wrong_arguments_are_refused_at_once(cluster: Cluster) -> None:
    cluster.run(3, refuse)


def test_shards_are_refused() -> None:
    """In `connect` there was an error of NumPy."""

    def make(rank: int) -> str:
        model = nn.Linear(8, 16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return said_by(partial(ServerOptimizer, sgd(model.parameters()), model=model))

    for said in threads(2, make):
        assert said.startswith("TypeError: the model's parameters are DTensors, and each rank of a")


def test_it_has_the_interface_of_the_local_optimizer(cluster: Cluster) -> None:
    cluster.run(3, share)


def test_a_state_comes_back(cluster: Cluster) -> None:
    assert min(cluster.run(3, save_and_load)) > 0


def test_sparse_gradients_are_refused_by_name(cluster: Cluster) -> None:
    worker, server = cluster.run(2, refuse_sparse_gradients)
    assert "the gradient of 0.weight is sparse (torch.sparse_coo)" in worker
    assert "rank 0 stopped: TypeError: the gradient of 0.weight is sparse" in server


def test_a_gradient_of_another_model_is_refused(cluster: Cluster) -> None:
    assert cluster.run(3, connect_late, False) == ["stepped", "stepped", "served"]
    first, second, server = cluster.run(3, connect_late, True)
    assert "call connect() on every rank before the first forward" in first
    assert (second, server) == (first, "served")


def run_example(port: int) -> str:
    with started_by_torchrun(port), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(REPOSITORY / "examples/server.py"), run_name="__main__")
    return printed.getvalue()


def test_the_example_runs(cluster: Cluster) -> None:
    said = "".join(cluster.run(3, run_example, free_port()))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < 0.8 * losses[0], said
    assert re.search(r"role +server, 2 workers and 1 servers", said)
    assert "version    200 (0 not finite)" in said
