"""Arguments of another type than is meant are refused by their names, at every door."""

from __future__ import annotations

import io
import json
from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from cluster import free_port
from gradwire.contrib.qsvrg import QSVRG
from gradwire.contrib.way import Way
from gradwire.torch import (
    BackupWorkers,
    Compression,
    DiLoCo,
    Execution,
    FullyShardComm,
    GradwireState,
    GroupFolder,
    LocalSteps,
    Members,
    Overlap,
    Schedule,
    ServerOptimizer,
    ShardedOptimizer,
    advise,
    compress,
    outer_nesterov,
    register_backend,
    reshard,
    sparse_loco,
)
from gradwire.weights import Publisher, Subscriber

Make = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _wrapping(way: Make) -> Make:
    def make(**options: Any) -> Any:
        model = nn.Linear(3, 2)
        return way(AdamW(model.parameters()), **{"model": model, **options})

    return make


def _serving(**options: Any) -> ServerOptimizer:
    return ServerOptimizer(SGD(nn.Linear(3, 2).parameters()), **options)


def _minimizing(**options: Any) -> QSVRG:
    given = {"smoothness": 2.0, "convexity": 1.0, **options}
    return QSVRG([nn.Parameter(torch.zeros(3))], lambda j: torch.zeros(()), 4, **given)


def _diloco(**options: Any) -> DiLoCo:
    model = nn.Linear(3, 2)
    usual = {"model": model, "inner_optimizer": AdamW(model.parameters()), "sync_every": 2}
    return DiLoCo(**{"outer_optimizer": outer_nesterov(), **usual, **options})


local, sharded = _wrapping(LocalSteps), _wrapping(ShardedOptimizer)


def _compressing(**options: Any) -> Any:
    model = nn.Linear(3, 2)
    return compress(**{"model": model, "optimizer": AdamW(model.parameters()), **options})


def _advising(**options: Any) -> Any:
    return advise(**{"model": nn.Linear(3, 2), "step": print, **options})


def _adapter(codec: Any = None, **options: Any) -> Way:
    return Way("GradwireCallback", codec, options)


REFUSED: list[tuple[Make, dict[str, Any], str]] = [
    (Compression, {"exclude": "*.bias"}, "exclude is '*.bias'; a list of texts is needed"),
    (Compression, {"exclude": [1]}, "exclude is [1]; a list of texts is needed"),
    (Compression, {"rules": [("a", 3)]}, "rules is [('a', 3)]; a list of tuples of texts"),
    (Compression, {"rules": ["ab"]}, "rules is ['ab']; a list of tuples of texts is needed"),
    (Compression, {"codec": 4}, "codec is 4; a text is needed"),
    (Compression, {"codec": None}, "codec is None; a text is needed"),
    (Compression, {"min_numel": "9"}, "min_numel is '9'; a whole number is needed"),
    (Members, {"on_lost": True}, "on_lost is True; a text is needed"),
    (Members, {"lost_after": "9"}, "lost_after is '9'; a number is needed"),
    (Members, {"process_group": "world"}, "process_group is 'world'; a process group of torch"),
    (Members, {"store": "host:1"}, "store is 'host:1'; a store of torch.distributed, such as TCP"),
    (Execution, {"timeout": None}, "timeout is None; a number is needed"),
    (Execution, {"threads": torch.tensor(1.5)}, "threads is a Tensor; a whole number is needed"),
    (Execution, {"offload_residuals": "no"}, "offload_residuals is 'no'; True or False is needed"),
    (Schedule, {"mix": "0.5"}, "mix is '0.5'; a number is needed"),
    (Schedule, {"gate": True}, "gate is True; a text is needed"),
    (BackupWorkers, {"number": 1.5}, "number is 1.5; a whole number is needed"),
    (
        GradwireState,
        {"overlap": False},
        "overlap is False; Overlap.ON, Overlap.NEXT_STEP or Overlap.OFF is needed",
    ),
    (GradwireState, {"start_iter": 1.5}, "start_iter is 1.5; a whole number is needed"),
    (GradwireState, {"scaler": 2.0}, "scaler is 2.0; a torch.amp.GradScaler is needed"),
    (GradwireState, {"optimizer": SGD}, "optimizer is the class SGD; a torch.optim.Optimizer or"),
    (GradwireState, {"compression": {"codec": "raw"}}, "compression is {'codec': 'raw'}; a Comp"),
    (_compressing, {"codec": 4}, "codec is 4; a text is needed"),
    (_compressing, {"model": SGD}, "model is the class SGD; a torch.nn.Module is needed"),
    (_compressing, {"optimizer": nn.Linear(2, 2)}, "optimizer is a Linear; a torch.optim.Optimi"),
    (_compressing, {"late_momentum": "no"}, "late_momentum is 'no'; True or False is needed"),
    (_compressing, {"execution": 3}, "execution is 3; an Execution is needed"),
    (local, {"every": 2.5}, "every is 2.5; a whole number is needed"),
    (local, {"correct_noise": "no"}, "correct_noise is 'no'; True or False is needed"),
    (local, {"clip_norm": "1"}, "clip_norm is '1'; a number is needed"),
    (local, {"outer": "sgd"}, "outer is 'sgd'; a "),
    (local, {"schedule": 4}, "schedule is 4; a Schedule is needed"),
    (_diloco, {"sync_every": "2"}, "sync_every is '2'; a whole number is needed"),
    (_diloco, {"fragment_update_alpha": "0"}, "fragment_update_alpha is '0'; a number is needed"),
    (_diloco, {"outer_optimizer": "sgd"}, "outer_optimizer is 'sgd'; a "),
    (sharded, {"model": "tiny"}, "model is 'tiny'; a torch.nn.Module is needed"),
    (local, {"model": None}, "model is None; a torch.nn.Module is needed"),
    (_diloco, {"model": "tiny"}, "model is 'tiny'; a torch.nn.Module is needed"),
    (
        _diloco,
        {"inner_optimizer": [3]},
        "inner_optimizer is [3]; a",
    ),
    (sharded, {"compression": "raw"}, "compression is 'raw'; a Compression is needed"),
    (_serving, {"servers": "1"}, "servers is '1'; a whole number is needed"),
    (_serving, {"barrier": None}, "barrier is None; a text is needed"),
    (_serving, {"backup_workers": "1"}, "backup_workers is '1'; a whole number or a BackupWorkers"),
    (_serving, {"model": "tiny"}, "model is 'tiny'; a torch.nn.Module is needed"),
    (_serving, {"named_parameters": 3}, "named_parameters is 3; a list of tuples is needed"),
    (
        lambda **options: FullyShardComm(nn.Linear(3, 2), **options),
        {"overlap": "no"},
        "overlap is 'no'; True or False is needed",
    ),
    (
        FullyShardComm,
        {"model": SGD},
        "model is the class SGD; a torch.nn.Module is needed",
    ),
    (
        lambda **options: FullyShardComm(nn.Linear(3, 2), **options),
        {"weights_rules": [("*",)]},
        "weights_rules is [('*',)]; a list of tuples of texts is needed",
    ),
    (_adapter, {"codec": 4}, "codec is 4; a text is needed"),
    (_adapter, {"start_iter": "2"}, "start_iter is '2'; a whole number is needed"),
    (_adapter, {"every": 2, "late_momentum": "no"}, "late_momentum is 'no'; True or False is"),
    (register_backend, {"all_reduce": 3}, "all_reduce is 3; a text is needed"),
    (register_backend, {"dtypes": torch.float32}, "dtypes is a dtype; a list of torch.dtypes is"),
    (outer_nesterov, {"lr": "0.7"}, "lr is '0.7'; a number is needed"),
    (sparse_loco, {"density": None}, "density is None; a number is needed"),
    (_advising, {"codecs": "int8"}, "codecs is 'int8'; a list of texts is needed"),
    (_advising, {"step": 3}, "step is 3; a function is needed"),
    (_advising, {"every": "2"}, "every is '2'; a whole number is needed"),
    (reshard, {"states": [], "world_size": "2"}, "world_size is '2'; a whole number is needed"),
    (_minimizing, {"steps": 1.5}, "steps is 1.5; a whole number is needed"),
    (_minimizing, {"smoothness": "2"}, "smoothness is '2'; a number is needed"),
    (GroupFolder, {"source": "0"}, "source is '0'; a whole number or a list of whole numbers is"),
    (Publisher, {"store": 3}, "store is 3; a text or a path or a Folder is needed"),
    (Subscriber, {"store": "here", "version": "3"}, "version is '3'; a whole number is needed"),
]


@pytest.mark.parametrize(("door", "given", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_a_wrong_type_is_refused_by_name(door: Make, given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as refused:
        door(**given)
    assert str(refused.value).startswith(said)


def test_what_converts_to_the_type_is_taken() -> None:
    Compression(exclude=("*.bias",), rules=[["*.weight", "raw"]], min_numel=np.int32(4))  # type: ignore[list-item, arg-type]
    Execution(timeout=np.float32(5), seed=torch.tensor(3), offload_residuals=False)  # type: ignore[arg-type]
    Execution(timeout=5)
    Schedule(np.int64(4), mix=torch.tensor(0.5))  # type: ignore[arg-type]
    GradwireState(scaler=torch.amp.GradScaler("cpu"), overlap=Overlap.OFF)
    GradwireState(optimizer=[SGD(nn.Linear(2, 2).parameters())])
    GradwireState(process_group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    for optimizer in (
        local(clip_norm=np.float64(1), late_momentum=np.bool_(False), outer=outer_nesterov(lr=1)),
        LocalSteps(AdamW(model.parameters()), model, outer=SGD(model.parameters())),
        sharded(codec="int8", process_group=dist.group.WORLD),
    ):
        optimizer.close()


def _own_numbers(optimizer: Any) -> None:
    """What is saved and reported has numbers of Python alone."""
    optimizer.step()
    json.dumps(optimizer.stats().as_dict())
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    torch.load(saved, weights_only=True)
    optimizer.close()


def test_what_converts_to_the_type_is_used_as_that() -> None:
    kinds: list[Make] = [np.int64, torch.tensor]
    for of in kinds:
        execution = Execution(timeout=of(20), seed=of(3), threads=of(1))
        _own_numbers(local(every=of(1), clip_norm=of(1), execution=execution))
        _own_numbers(local(schedule=Schedule(of(2), of(1), of(1), gate="bfloat16")))
        _own_numbers(local(outer=outer_nesterov(lr=of(1)), every=of(2)))
        _own_numbers(sharded(compression=Compression(np.str_("int8"), min_numel=of(2))))
        members = Members(ranks_per_machine=of(1))
        state = GradwireState(start_iter=of(1), exchange="hierarchical", members=members)
        json.dumps(state.state_dict())
    assert type(Execution(timeout=np.float32(5)).timeout) is float  # type: ignore[arg-type]
    assert type(Execution(timeout=5).timeout) is int
    rules: Any = UserList([UserList(["*.weight", np.str_("raw")])])
    assert repr(Compression(rules=rules).rules) == "[('*.weight', 'raw')]"


def test_optimizers_that_send_by_themselves_are_refused() -> None:
    # (The module takes long to import.)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for way in (LocalSteps, ShardedOptimizer, compress):
        model = nn.Linear(3, 2)
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
        given: tuple[Any, ...] = (model, zero) if way is compress else (zero, model)
        with pytest.raises(TypeError, match="ZeroRedundancyOptimizer sends parameters to the oth"):
            way(*given)
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer sends parameters to the oth"):
        ServerOptimizer(zero, model=model)
