"""Process groups, wrong uses, torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gradwire
import gradwire.torch
import jobs
from cluster import Cluster, Failed
from gradwire.torch.options import grouped
from selection import long
from torchrun import run_program

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


def test_a_part_of_the_world_and_two_models(cluster: Cluster) -> None:
    digests = cluster.run(4, jobs.train_in_part, [1, 3])
    assert digests[0] is digests[2] is None
    assert digests[1] == digests[3] is not None


def test_a_closed_state_keeps_what_it_knows(cluster: Cluster) -> None:
    for same_stats, same_residuals, message in cluster.run(2, jobs.close_and_go_on):
        assert same_stats
        assert same_residuals
        assert "it was closed" in message


def test_a_pattern_that_matches_nothing_is_named_once(cluster: Cluster) -> None:
    for said in cluster.run(2, jobs.warned_of_patterns):
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
def test_wrong_uses_are_refused(fragile_cluster: Cluster, what: str, message: str) -> None:
    fragile_cluster.start(1, jobs.misuse, what)
    answer = fragile_cluster.collect([0])[0]
    assert isinstance(answer, Failed)
    assert message in answer.trace


def test_a_state_for_other_ranks_than_the_models_is_refused(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, jobs.misuse_groups)
    said = fragile_cluster.collect(range(3), seconds=60)
    for rank in (0, 2):
        assert not isinstance(said[rank], Failed), said[rank].trace
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
