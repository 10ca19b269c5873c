"""The statistics equal the bytes that went over the wire."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch.optim import SGD

import jobs
import runs
from cluster import Cluster
from gradwire.torch import Compression, GradwireState
from gradwire.torch.errors import OutgrownResidualWarning
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.network.transport import OVERHEAD_BYTES
from jobs import Counted
from runs import Case, Run
from training import Options
from ways import Training, Way

WORLD = 3
STEPS = 20  # the error norm is measured in the 16th compressed step


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> list[list[Counted]]:
    runs = [Options(STEPS, {"codec": "3lc:s=1.75"}), Options(STEPS, {"codec": "raw"})]
    return cluster.run(WORLD, jobs.train_and_count, runs)


@pytest.mark.parametrize("run", [0, 1], ids=["3lc", "raw"])
def test_bytes_are_those_of_the_wire(ranks: list[list[Counted]], run: int) -> None:
    for rank in ranks:
        stats, counted = rank[run].trained.stats, rank[run]
        assert stats["push_bytes"] == counted.sent["push"] > 0
        assert stats["pull_bytes"] == counted.sent["pull"] > 0
        assert stats["received_bytes"] == counted.received
        # The hellos hold the descriptions to compare.
        assert stats["control_bytes"] == counted.sent["hello"] + OVERHEAD_BYTES * counted.messages
        last = rank[run].trained.last_steps
        assert sum(step["push_bytes"] for step in last) == stats["push_bytes"]
        assert sum(step["pull_bytes"] for step in last) == stats["pull_bytes"]
        assert sum(step["control_bytes"] for step in last) == stats["control_bytes"]
    assert sum(rank[run].received for rank in ranks) == sum(
        rank[run].sent["push"] + rank[run].sent["pull"] for rank in ranks
    )


def test_bits_and_ratio(ranks: list[list[Counted]]) -> None:
    values = sum(p.size for p in ranks[0][0].trained.parameters.values())
    for compressed, raw in ranks:
        stats = compressed.trained.stats
        assert stats["steps"] == STEPS
        assert stats["raw_steps"] == 2
        assert stats["values"] == STEPS * values
        assert stats["codec"] == "3lc:s=1.75"
        for step in raw.trained.last_steps:
            assert 32 < step["push_bits_per_value"] < 33
            assert 32 < step["pull_bits_per_value"] < 33
        for step in compressed.trained.last_steps:
            bound = (32, 33) if step["raw"] else (0.1, 2.0)
            assert bound[0] < step["push_bits_per_value"] < bound[1]
            assert bound[0] < step["pull_bits_per_value"] < bound[1]
        assert 0.9 < raw.trained.stats["ratio"] < 1
    pushed = 4 * (WORLD - 1) * STEPS * values  # all ranks together, as float32; as much is pulled
    sent = sum(sum(c.sent.values()) + 8 * c.messages for c, _ in ranks)
    ratios = [c.trained.stats["ratio"] for c, _ in ranks]
    assert min(ratios) < 2 * pushed / sent < max(ratios)


def test_times_and_losses(ranks: list[list[Counted]]) -> None:
    for compressed, raw in ranks:
        stats = compressed.trained.stats
        for key in ("encode_seconds", "decode_seconds", "wire_seconds", "own_seconds"):
            assert 0 < stats[key] < 60
        assert stats["own_seconds"] > stats["encode_seconds"]
        assert 0.5 < stats["error_norm"] < 20
        assert raw.trained.stats["error_norm"] is None, "of compressed tensors alone"


def test_what_goes_raw_is_listed_with_the_reason(ranks: list[list[Counted]]) -> None:
    compressed, raw = ranks[0]
    listed = {t["name"]: (t["numel"], t["reason"]) for t in compressed.trained.stats["raw_tensors"]}
    assert listed["second.bias"] == (144, "fewer than two dimensions")
    assert "second.weight" not in listed
    assert raw.trained.stats["raw_tensors"] == ()


def test_what_is_encoded_of_each_tensor_adds_up(ranks: list[list[Counted]]) -> None:
    """Compressed tensors together have the bits of a compressed value, and raw ones 32. In a step
    that is not raw, all ranks but the owner push a value, and the owner pulls it."""
    raw = {tensor["name"] for tensor in ranks[0][0].trained.stats["raw_tensors"]}
    for compressed, uncompressed in ranks:
        tensors = compressed.trained.stats["tensors"]
        assert {t["name"] for t in tensors} == set(compressed.trained.parameters)
        for leg in ("push", "pull"):
            parts = [t for t in tensors if t["name"] not in raw]
            values = sum(t[f"values_{leg}ed"] for t in parts)
            found = 8 * sum(t[f"{leg}_payload_bytes"] for t in parts) / values
            assert found == pytest.approx(compressed.trained.stats[f"compressed_bits_{leg}"])
            for tensor in tensors:
                if tensor["name"] in raw:
                    assert tensor[f"{leg}_payload_bytes"] == 4 * tensor[f"values_{leg}ed"]
        assert len(uncompressed.trained.stats["tensors"]) == len(tensors)
    of_all = [rank[0].trained.stats["tensors"] for rank in ranks]
    for of_ranks in zip(*of_all, strict=True):
        numel = of_ranks[0]["numel"]
        assert sum(t["values_pushed"] for t in of_ranks) == (WORLD - 1) * (STEPS - 2) * numel
        assert sum(t["values_pulled"] for t in of_ranks) == (STEPS - 2) * numel


def test_the_last_layers_go_raw_by_a_setting(cluster: Cluster) -> None:
    options = {"codec": "int8", "start_iter": 0}
    runs = [Options(2, {**options, "exclude_last": last}) for last in (0, 1, 2)]
    for last, trained in enumerate(cluster.run(WORLD, jobs.train_each, runs)[0]):
        raw = {tensor["name"]: tensor["reason"] for tensor in trained.stats["raw_tensors"]}
        # Parameters are in the order first, second, conv, branch, last.
        assert raw.get("last.weight") == ("excluded by 'last.*'" if last > 0 else None)
        assert raw.get("branch.weight") == ("excluded by 'branch.*'" if last > 1 else None)
        assert "conv.weight" not in raw


def test_layers_are_modules_with_a_matrix() -> None:
    """Scales and biases of a normalisation, and modules without parameters, are no layers."""
    tensors = [("in", [3, 3]), ("h[0].fc.weight", [4, 3]), ("h[0].fc.bias", [4]), ("norm.w", [4])]

    def excluded(last: int) -> list[str]:
        given = ExchangeSettings(exclude=["given"], exclude_last=last)
        settings = given.with_last_excluded(tensors)
        assert settings.with_last_excluded(tensors) == settings
        segments = settings.layout(tensors, 1).segments
        return sorted(s["name"] for s in segments if "excluded" in s["reason"])

    assert excluded(0) == []
    assert excluded(1) == ["h[0].fc.bias", "h[0].fc.weight"]
    assert excluded(2) == ["h[0].fc.bias", "h[0].fc.weight", "in"]
    with pytest.raises(ValueError, match="exclude_last is 3; the model has 2 layers"):
        excluded(3)
    with pytest.raises(ValueError, match="exclude_last is -1; it is a number of layers"):
        GradwireState(compression=Compression(exclude_last=-1))


def test_the_report_can_be_read(ranks: list[list[Counted]]) -> None:
    compressed, raw = ranks[0]
    report = compressed.trained.report
    assert "3lc:s=1.75" in report
    assert f"{compressed.trained.stats['push_bytes']:,} bytes" in report
    assert re.search(
        r"^compressed 0\.\d+ bits a value pushed, 0\.\d+ bits a value pulled \(without headers",
        report,
        re.MULTILINE,
    )
    assert "\ncompressed" not in raw.trained.report
    assert "second.bias (144): fewer than two dimensions" in report
    assert "compression does not pay" in raw.trained.report, "raw with its headers never does"


def train_with_too_much_owed(factor: float, residual: str = "f32") -> list[Run]:
    """40 steps that change nothing, and begin with a residual of `second.weight`."""

    def owe(training: Training) -> None:
        owed = torch.full((training.model.get_parameter("second.weight").numel(),), factor)
        piece = {"kind": "push", "name": "second.weight", "offset": 0, "values": owed}
        state = training.source.state_dict()
        mine = [piece] if training.rank == 0 else []
        training.source.load_state_dict(state | {"residuals": mine, "ranks_per_machine": 1})

    way = Way("hook", {"codec": f"topk:ratio=0.001,residual={residual}", "start_iter": 0})
    return runs.run_one(2, Case(way, partial(SGD, lr=0.0), 40, begin=owe))


def test_a_residual_that_outgrew_its_input_is_named_once() -> None:
    first, other = train_with_too_much_owed(1e4)
    (said,) = first.said(OutgrownResidualWarning)
    assert "residual of second.weight is" in said
    assert "times as large as its input in step 15 (limit 100)" in said
    (found,) = first.stats["outgrown_residuals"]
    assert (found["name"], found["step"]) == ("second.weight", 15)
    assert found["factor"] > 1000
    assert said in first.stats["remarks"]
    assert other.said(OutgrownResidualWarning) == []
    assert other.stats["outgrown_residuals"] == ()


def test_a_residual_that_is_too_large_for_bf16_is_named() -> None:
    run, _ = train_with_too_much_owed(0.3, "bf16")
    (said,) = run.said(OutgrownResidualWarning)
    assert "in step 15 (limit 32): rounding it to bfloat16 loses part of the input" in said
    (found,) = run.stats["outgrown_residuals"]
    assert 32 < found["factor"] < 100
    run, _ = train_with_too_much_owed(0.3, "f32")
    assert run.said(OutgrownResidualWarning) == []


def test_a_residual_within_the_limit_is_not_named() -> None:
    for run in train_with_too_much_owed(1e-3):
        assert run.said(OutgrownResidualWarning) == []
        assert run.stats["outgrown_residuals"] == ()
