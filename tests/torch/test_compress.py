"""`compress`, the records of options, and errors for arguments that a class lacks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch
from cluster import Cluster
from gradwire._core import spell_out_codec
from gradwire.option_record import OptionRecord
from gradwire.torch import (
    Compression,
    Execution,
    FullyShardComm,
    GradwireState,
    LocalSteps,
    Members,
    Schedule,
    ServerOptimizer,
    ShardedOptimizer,
    compress,
)
from gradwire.torch.options import RECORDS, grouped
from gradwire.torch.wrapping_optimizer import is_adaptive

SMALL, SAFE = (spell_out_codec(name) for name in ("small", "safe"))
WAYS = (GradwireState, LocalSteps, FullyShardComm, ShardedOptimizer, ServerOptimizer)
PROTOCOL = ("stats", "scalars", "log_to", "state_dict", "load_state_dict", "close", "error")


def taken(model_kind: str, optimizer_kind: str) -> tuple[str, str, str]:
    """The class that compress takes, its codec, and what it says on this rank."""
    import contextlib
    import io

    model: nn.Module = nn.Sequential(nn.Linear(300, 4), nn.Linear(4, 300))
    optimizer_class = getattr(torch.optim, optimizer_kind)
    if "ddp" in model_kind:
        model = DistributedDataParallel(model)
    elif "fsdp" in model_kind:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if "compiled" in model_kind:
        model = cast(nn.Module, torch.compile(model, backend="eager"))
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        made = compress(model, optimizer)
    stepping = made if isinstance(made, LocalSteps) else optimizer
    for _ in range(4):
        stepping.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        stepping.step()
    assert all(hasattr(made, name) for name in PROTOCOL)
    stats = made.stats()
    codec = stats.exchanges.codec if isinstance(made, LocalSteps) else stats.codec
    assert made.scalars()["gradwire/ratio"] > 1
    name = type(made).__name__
    made.close()
    return name, codec, said.getvalue()


@pytest.mark.parametrize(
    ("model", "optimizer", "way", "codec"),
    [
        ("ddp", "SGD", "GradwireState", SMALL),
        ("ddp", "AdamW", "GradwireState", SAFE),
        ("plain", "SGD", "LocalSteps", SMALL),
        ("plain", "AdamW", "LocalSteps", SMALL),
        ("fsdp", "AdamW", "FullyShardComm", SAFE),
        ("compiled ddp", "SGD", "GradwireState", SMALL),
        ("compiled fsdp", "AdamW", "FullyShardComm", SAFE),
    ],
)
def test_compress_takes_the_way_that_fits(
    cluster: Cluster, model: str, optimizer: str, way: str, codec: str
) -> None:
    first, second = cluster.run(2, taken, model, optimizer)
    assert first[:2] == second[:2] == (way, codec)
    assert second[2] == ""
    assert first[2].count("\n") == 1
    for part in (way, codec, optimizer, "because"):
        assert part in first[2]


def refuse_in_ddp() -> str:
    model = DistributedDataParallel(nn.Linear(3, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError) as raised:
        compress(model, sgd, every=4)
    with pytest.raises(TypeError, match=r"compress has no argument 'codex'; did you mean codec"):
        compress(model, sgd, codex="small")
    return str(raised.value)


def compress_twice() -> str:
    model = DistributedDataParallel(nn.Linear(4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    compress(model, sgd)
    try:
        compress(model, sgd)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_gets_one_hook(cluster: Cluster) -> None:
    for message in cluster.run(2, compress_twice):
        assert message.startswith("compress puts a hook into DistributedDataParallel, and this")
        assert "gradwire_hook already: compress a model once" in message


def refuse_part(kind: str, words: str) -> None:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel

    part = nn.Linear(4, 4)
    if kind == "ddp":
        model = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(part))
    elif kind == "replicate":
        model = nn.Sequential(nn.Linear(4, 4), replicate(part))
    else:
        cpu = torch.device("cpu")
        model = nn.Sequential(nn.Linear(4, 4), FullyShardedDataParallel(part, device_id=cpu))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    makers: list[Callable[[], Any]] = [
        lambda: compress(model, sgd),
        lambda: ShardedOptimizer(sgd, model),
        lambda: ServerOptimizer(sgd, model=model),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=words):
            make()
    if kind == "ddp":
        compress(model, torch.optim.SGD(model[0].parameters(), lr=0.1)).close()


def test_a_part_in_ddp_is_named(cluster: Cluster) -> None:
    cluster.run(2, refuse_part, "ddp", "1 is in DistributedDataParallel, which averages gradients")


def test_what_replicate_averages_is_refused(cluster: Cluster) -> None:
    """Its gradients went uncompressed beside the changes."""
    cluster.run(2, refuse_part, "replicate", r"1 is in replicate\(\), which averages gradients")


def test_shards_of_fsdp1_are_refused(cluster: Cluster) -> None:
    """Every rank took over the shards of rank 0."""
    words = "1 is in FullyShardedDataParallel, and each rank has other values of it: take fully_sha"
    cluster.run(2, refuse_part, "fsdp1", words)


def test_compress_says_whose_an_option_is(cluster: Cluster) -> None:
    (said,) = cluster.run(1, refuse_in_ddp)
    assert "every is for LocalSteps, and compress takes GradwireState" in said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("codex", "did you mean codec=...?"),
        ("min_numl", "did you mean compression=Compression(min_numel=...)?"),
        ("min_numel", "write compression=Compression(min_numel=...)"),
        ("timeout", "write execution=Execution(timeout=...)"),
        ("random_seed", "as PowerSGD calls it: write execution=Execution(seed=...)"),
        ("should_quantize", "as torchft calls it: write codec=..."),
    ],
)
def test_an_argument_that_a_class_lacks_is_explained(way: type, argument: str, said: str) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"{way.__name__} has no argument '{argument}'")
    ) as raised:
        way(**{argument: 1})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("way", "argument", "said"),
    [
        (LocalSteps, "sync_every", "as torchft calls it: write every=..."),
        (LocalSteps, "fragment_sync_delay", "write schedule=Schedule(delay=...)"),
        (GradwireState, "start_powerSGD_iter", "as PowerSGD calls it: write start_iter=..."),
        (
            GradwireState,
            "sync_every",
            "torchft's word for every, which GradwireState does not have",
        ),
        (GradwireState, "qqqq", "it has codec, exchange,"),
        (Schedule, "sync_every", "Schedule has no argument 'sync_every', as torchft calls it"),
        (Compression, "excude", "Compression has no argument 'excude'; did you mean exclude=...?"),
    ],
)
def test_words_of_other_libraries(way: type, argument: str, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        way(**{argument: 1})


def test_classes_take_few_arguments() -> None:
    most = {"LocalSteps": 16, "GradwireState": 11, "FullyShardComm": 11, "ServerOptimizer": 16}
    for way in WAYS:
        parameters = inspect.signature(way).parameters
        assert len(parameters) <= most.get(way.__name__, 6)
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_each_option_is_in_one_record_and_checked_there() -> None:
    options = [field.name for record in RECORDS.values() for field in fields(record)]
    assert len(options) == len(set(options))
    bad: list[tuple[type[OptionRecord], dict[str, Any], str]] = [
        (Compression, {"exclude_last": -1}, "exclude_last is -1"),
        (Schedule, {"every": 0}, "every is 0"),
        (Members, {"on_lost": "wait"}, "on_lost is 'wait'"),
        (Members, {"min_ranks": 2}, "min_ranks= is for ranks that come and go"),
        (Execution, {"timeout": 0.0}, "timeout is 0.0"),
    ]
    for record, given, said in bad:
        with pytest.raises(ValueError, match=re.escape(said)):
            record(**given)
    for value in (1.5, 2.0, "2", None):  # with every=1.5 exchanges would be three steps apart
        with pytest.raises(TypeError, match=re.escape(f"every is {value!r}; a whole number")):
            Schedule(every=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="codec is given twice: as codec= and in Compression"):
        GradwireState("raw", compression=Compression("int8"))


def test_options_by_their_names_are_put_into_records() -> None:
    flat = {"codec": "raw", "every": 4, "delay": 2, "seed": 3, "min_numel": 1, "clip_norm": 1.0}
    assert grouped(flat) == {
        "codec": "raw",
        "clip_norm": 1.0,
        "schedule": Schedule(4, delay=2),
        "execution": Execution(seed=3),
        "compression": Compression(min_numel=1),
    }
    assert grouped({"every": 4}) == {"every": 4}


@pytest.mark.parametrize("name", ["small", "safe", "half-byte"])
def test_names_of_codecs_are_spelled_out(name: str) -> None:
    codec = spell_out_codec(name)
    assert GradwireState(name).stats().codec == codec
    given = Compression(pull_codec=f"{name}:ef=off", rules=[("a*", name, "push")])
    assert given.pull_codec == f"{codec},ef=off"
    assert given.rules == [("a*", codec, "push")]
    x = torch.linspace(-1, 1, 1000).numpy()
    assert gradwire.encode(x, name) == gradwire.encode(x, codec)


@pytest.mark.parametrize(
    ("optimizer", "adaptive"),
    [("SGD", False), ("ASGD", False), ("Adam", True), ("RMSprop", True), ("Adafactor", True)],
)
def test_adaptive_optimizers_are_found_before_their_first_step(
    optimizer: str, adaptive: bool
) -> None:
    made = getattr(torch.optim, optimizer)([nn.Parameter(torch.ones(3, 3))], lr=0.1)
    assert is_adaptive(made) == adaptive
    assert not made.state


class Around(torch.optim.Optimizer):
    """Wraps another one, and does not call Optimizer.__init__, as many do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_without_a_place_for_hooks_steps_on_and_is_refused() -> None:
    model = nn.Linear(3, 3)
    around = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    assert is_adaptive(around), "it is not known"
    model(torch.ones(3)).sum().backward()
    around.step()
    for wrap in (LocalSteps, ShardedOptimizer):
        with pytest.raises(TypeError, match=r"Around\.__init__ does not call that of torch\.optim"):
            wrap(around, model)


def outer_object() -> tuple[bool, str]:
    def train(outer: Any) -> torch.Tensor:
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(300, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if outer is None:
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with_outer = LocalSteps(inner, model, "raw", every=2, outer=outer)
        for step in range(6):
            with_outer.zero_grad()
            model(torch.full((2, 300), 0.01 * (step + dist.get_rank()))).square().sum().backward()
            with_outer.step()
        with_outer.close()
        return model.weight.detach().clone()

    same = torch.equal(train(None), train(gradwire.torch.outer_nesterov(0.7)))
    model = nn.Linear(3, 3)
    groups = [{"params": [p], "lr": 0.1} for p in model.parameters()]
    with pytest.raises(ValueError, match="2 groups of parameters") as raised:
        LocalSteps(torch.optim.SGD(groups), model, outer=torch.optim.SGD(groups))
    return same, str(raised.value)


def test_outer_takes_an_optimizer(cluster: Cluster) -> None:
    for same, _ in cluster.run(2, outer_object):
        assert same


def test_errors_are_in_a_module_of_their_own() -> None:
    public = set(gradwire.torch.__all__)
    assert not [name for name in public if name.endswith(("Error", "Warning"))]
    for name in vars(gradwire.torch.errors):
        assert name not in public
