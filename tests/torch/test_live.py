"""What a running training tells: names, units, steps, and that the numbers are those of stats()."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from gradwire.torch import GradwireState
from runs import threads
from training import loss_of, make_model
from ways import build

STEPS = 5


class Writer:
    """Keeps what a SummaryWriter would write."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


@dataclass
class Logged:
    """What one rank logged. before: `scalars()` before the first step. last: after the last one."""

    written: list[tuple[str, float, int]]
    before: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


def log(way: str, every: int, options: dict[str, Any]) -> Logged:
    training, writer = build(way, make_model(), **options), Writer()
    source = training.source
    source.log_to(writer, every=every)
    before = source.scalars()
    training.run(STEPS, loss_of)
    training.close()
    stats = source.stats().as_dict()
    if training.way.kind == "fsdp":
        stats |= {"weights": source.weights_stats().as_dict()}
    return Logged(writer.written, before, source.scalars(), stats)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "live.md"

COMPRESSED, INT8 = {"codec": "3lc", "start_iter": 1}, {"codec": "int8"}
HOOK = log, "hook", 1, COMPRESSED
SERVERS = log, "servers", 1, INT8


def by_name(logged: Logged, name: str) -> dict[int, float]:
    return {step: value for tag, value, step in logged.written if tag == f"gradwire/{name}"}


def test_the_hook_logs_each_complete_step(cluster: Cluster) -> None:
    for logged in cluster.run(2, *HOOK):
        pushed = by_name(logged, "push_bytes")
        assert list(pushed) == list(range(STEPS))
        assert sum(pushed.values()) == logged.stats["push_bytes"]
        assert sum(by_name(logged, "wire_seconds").values()) == pytest.approx(
            logged.stats["wire_seconds"]
        )
        bits = by_name(logged, "push_bits")
        assert 32 < bits[0] < 33, "the first iteration goes raw"
        assert all(0.1 < bits[step] < 3 for step in range(1, STEPS))
        assert by_name(logged, "ratio")[STEPS - 1] == pytest.approx(logged.stats["ratio"])
        assert logged.last["gradwire/push_bytes"] == pushed[STEPS - 1]
        assert logged.before["gradwire/sent_bytes_total"] == 0
        assert "gradwire/push_bits" not in logged.before
        assert {type(value) for _, value, _ in logged.written} == {float}
        assert {type(value) for value in logged.last.values()} == {float}


def test_some_steps_are_left_out(cluster: Cluster) -> None:
    for logged in cluster.run(2, log, "hook", 2, COMPRESSED):
        assert list(by_name(logged, "push_bytes")) == [0, 2, 4]


def test_a_sharded_optimizer_logs_each_step(cluster: Cluster) -> None:
    for logged in cluster.run(2, log, "ShardedOptimizer", 1, INT8):
        pushed = by_name(logged, "push_bytes")
        assert list(pushed) == list(range(STEPS))
        assert sum(pushed.values()) == logged.stats["push_bytes"]


@pytest.mark.parametrize("way", ["hook", "ShardedOptimizer", "LocalSteps, every step"])
def test_steps_that_come_again_after_a_state_was_loaded_are_logged_again(way: str) -> None:
    def roll_back(rank: int) -> list[int]:
        training, writer = build(way, make_model(), codec="int8"), Writer()
        training.source.log_to(writer, every=2)
        training.run(2, loss_of)
        state = training.state()
        training.run(3, loss_of)
        training.load(state, 2)
        training.run(3, loss_of)
        training.close()
        return [step for tag, _, step in writer.written if tag == "gradwire/push_bytes"]

    assert threads(1, roll_back) == [[0, 2, 4, 2, 4]]


def test_local_steps_log_exchanges_however_rarely_they_log(cluster: Cluster) -> None:
    for every, steps in ((2, [1, 3]), (3, [1, 3]), (4, [1])):
        for logged in cluster.run(2, log, "LocalSteps", every, INT8):
            assert list(by_name(logged, "push_bits")) == steps


def test_local_steps_send_nothing_between_exchanges(cluster: Cluster) -> None:
    for logged in cluster.run(2, log, "LocalSteps", 1, INT8):
        pushed = by_name(logged, "push_bytes")
        assert [step for step, sent in pushed.items() if sent] == [1, 3]
        assert list(by_name(logged, "push_bits")) == [1, 3]
        assert sum(pushed.values()) == logged.stats["push_bytes"]


def test_workers_and_servers_log(cluster: Cluster) -> None:
    *workers, server = cluster.run(3, *SERVERS)
    for logged in workers:
        assert logged.before["gradwire/push_bytes"] == 0
        assert "gradwire/ratio" not in logged.before
        pushed = by_name(logged, "push_bytes")
        assert list(pushed) == list(range(STEPS))
        assert sum(pushed.values()) == logged.stats["push_bytes"]
        assert sum(by_name(logged, "pull_bytes").values()) == logged.stats["pull_bytes"]
        assert 8 < by_name(logged, "push_bits")[2] < 10
        assert by_name(logged, "version")[STEPS - 1] == STEPS
        assert by_name(logged, "ratio")[STEPS - 1] == pytest.approx(logged.stats["ratio"])
    received = by_name(server, "push_bytes")
    assert len(received) == STEPS
    assert sum(received.values()) == sum(w.stats["push_bytes"] for w in workers)


def test_fully_shard_logs_gradients_and_weights(cluster: Cluster) -> None:
    for logged in cluster.run(2, log, "FSDP2, weights", 1, {"start_iter": 0}):
        assert list(by_name(logged, "push_bytes")) == list(range(STEPS))
        assert sum(by_name(logged, "push_bytes").values()) == logged.stats["push_bytes"]
        assert 16 < by_name(logged, "weights_pull_bits")[2] < 18
        total = sum(by_name(logged, "weights_pull_bytes").values())
        assert total == logged.stats["weights"]["pull_bytes"]


def test_the_page_names_every_scalar(cluster: Cluster) -> None:
    page = set(re.findall(r"`(gradwire/\w+)`", PAGE.read_text(encoding="utf-8")))
    late = {"gradwire/error_norm", "gradwire/weights_pull_bits"}  # of more steps, of fully_shard
    hook, server = cluster.run(2, *HOOK)[0], cluster.run(2, *SERVERS)[0]
    assert set(hook.last) | set(server.last) | late == page


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"a method add_scalar; this is a dict\. wandb\.log and ml"):
        GradwireState().log_to({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every is 0; valid are 1 and more"):
        GradwireState().log_to(Writer(), every=0)
