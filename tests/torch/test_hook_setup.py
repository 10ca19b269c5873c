"""Process groups, wrong uses, torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch
import runs
from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.errors import UnmatchedPatternWarning
from gradwire.torch.options import grouped
from runs import Case, said_by, threads
from selection import long
from torchrun import run_program
from training import digest, loss_of, make_model, make_optimizer, save
from ways import Way, build

REPOSITORY = Path(__file__).parents[2]


def test_each_exchange_has_its_default_codec() -> None:
    equals = [info for info in gradwire.exchanges() if not info["has_servers"]]
    defaults = {info["name"]: info["default_codec"] for info in equals}
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for name, codec in defaults.items():
        assert gradwire.torch.GradwireState(exchange=name, optimizer=sgd).stats().codec == codec
    assert defaults["ring"] == "int8"
    between = gradwire.torch.GradwireState(exchange="hierarchical:between=ring")
    assert between.stats().codec == "int8", "the codec of those that compress"
    given = gradwire.torch.GradwireState("3lc:s=1.75", exchange="ring")
    assert given.stats().codec == "3lc:s=1.75"


def test_a_part_of_the_world_and_two_models() -> None:
    def train(rank: int) -> list[str] | None:
        group = dist.new_group([1, 3])
        if rank in (0, 2):
            return None
        models = [make_model(), make_model()]
        ddps = [DistributedDataParallel(m, process_group=group, bucket_cap_mb=0.05) for m in models]
        for ddp, codec in zip(ddps, ("3lc:s=1.75", "bf16"), strict=True):
            ddp.register_comm_hook(GradwireState(codec, process_group=group), gradwire_hook)
        optimizers = [make_optimizer(model) for model in models]
        for step in range(5):
            for ddp, optimizer in zip(ddps, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(ddp, rank, step).backward()
                optimizer.step()
        assert digest(models[0]) != digest(models[1])
        return [digest(model) for model in models]

    digests = threads(4, train)
    assert digests[0] is digests[2] is None
    assert digests[1] == digests[3] is not None


def test_a_closed_state_keeps_what_it_knows() -> None:
    """But it takes no step."""

    def train(rank: int) -> str:
        training = build("hook", make_model(), start_iter=0)
        state = training.source
        training.step(loss_of)
        stats, residuals = state.stats(), save(state.state_dict())
        state.close()
        assert state.stats() == stats
        assert save(state.state_dict()) == residuals
        return said_by(lambda: training.step(loss_of))

    for message in threads(2, train):
        assert "it was closed" in message


def test_a_pattern_that_matches_nothing_is_named_once() -> None:
    """Some match a tensor of one bucket only."""
    rules = [("last.*", "raw"), ("lost.*", "raw")]
    options = {"codec": "3lc", "rules": rules, "exclude": ["first.bias", "bias"]}
    for run in runs.run_one(2, Case(Way("hook", options))):
        said = run.said(UnmatchedPatternWarning)
        assert len(said) == 2
        assert "matches 'bias'" in said[0]
        assert "matches 'lost.*'" in said[1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("float64", "float32, bfloat16 and float16 gradients; this bucket is torch.float64"),
        ("sparse", "TypeError: the gradient of 0.weight is sparse (torch.sparse_coo)"),
        ("shared state", "registered in 2 DistributedDataParallel modules"),
    ],
)
def test_wrong_uses_are_refused(what: str, message: str) -> None:
    def misuse(rank: int) -> None:
        model: nn.Module = nn.Linear(4, 4)
        inputs = torch.ones(2, 4)
        if what == "sparse":
            model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
            inputs = torch.tensor([[1, 2], [3, 4]])
        if what == "float64":
            model, inputs = model.double(), inputs.double()
        ddp, state = DistributedDataParallel(model), GradwireState()
        ddp.register_comm_hook(state, gradwire_hook)
        if what == "shared state":
            other = DistributedDataParallel(nn.Linear(4, 4))
            other.register_comm_hook(state, gradwire_hook)
        ddp(inputs).sum().backward()

    assert message in threads(1, lambda rank: said_by(lambda: misuse(rank)))[0]


def test_the_hooks_of_fsdp1_are_others() -> None:
    flat = torch.ones(4)
    for more in ((), (flat[:2],)):  # a shard, unless it is NO_SHARD
        with pytest.raises(TypeError, match=r"FullyShardedDataParallel gives hooks its own flat"):
            gradwire_hook(GradwireState(), flat, *more)


def test_a_state_for_other_ranks_than_the_models_is_refused() -> None:
    """The model averages over ranks 0 and 2, and the state over all."""

    def misuse(rank: int) -> None:
        group = dist.new_group([0, 2])
        if rank != 1:
            ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
            ddp.register_comm_hook(GradwireState(), gradwire_hook)
            ddp(torch.ones(2, 4)).sum().backward()

    said = threads(3, lambda rank: said_by(lambda: misuse(rank)))
    for rank in (0, 2):
        assert "averages over the ranks [0, 2], the GradwireState over [0, 1, 2]" in said[rank]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"codec": "3cl"}, gradwire.GradwireError, "3lc"),
        ({"codec": "3lc:s=2"}, gradwire.GradwireError, r"\[1, 2\)"),
        ({"pull_codec": "no"}, gradwire.GradwireError, "bf16"),
        ({"rules": [("*", "3lc", "sideways")]}, gradwire.GradwireError, "push, pull, both"),
        ({"target": "mmx"}, gradwire.GradwireError, "scalar"),
        ({"start_iter": -1}, ValueError, "start_iter is -1"),
        ({"timeout": 0.0}, ValueError, "timeout is 0"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gradwire.torch.GradwireState(**grouped(arguments))


def test_the_example_that_compares_losses_runs() -> None:
    printed, errors = run_program(REPOSITORY / "examples/same_loss.py", 2)
    raw, coded = (float(loss) for loss in re.findall(r": loss ([\d.]+)", printed))
    (difference, error) = re.findall(r"difference ([+-][\d.]+), known to about ([\d.]+)", printed)[
        0
    ]
    assert float(difference) == pytest.approx(coded - raw, abs=2e-4)
    assert abs(coded - raw) < 0.02
    assert 0 < float(error) < 0.01
    assert "leaked" not in errors


@pytest.mark.parametrize(
    ("example", "codec", "ranks"),
    [
        ("ddp", "3lc:s=1.00,coder=rice", 2),
        ("adamw", "3lc:s=1.00,coder=rice", 2),
        *long(("fsdp", "int8", 4), ("diloco", "qsgd:bits=4", 2)),
    ],
)
def test_the_examples_run_under_torchrun(example: str, codec: str, ranks: int) -> None:
    printed, errors = run_program(REPOSITORY / f"examples/{example}.py", ranks)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.7 * losses[0]
    assert codec in printed
    assert "x less than raw" in printed
    assert "leaked" not in errors
