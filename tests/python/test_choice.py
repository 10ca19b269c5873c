"""Choosers: the codecs of `auto` texts, decided from trials."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import gradwire
from auto_compressor import CompressorGroup
from gradwire._core import AutoGoal
from gradwire.choice import Chooser, Row
from gradwire.errors import LimitWarning

VALUES = np.random.default_rng(3).standard_normal(30_000).astype(np.float32)


def row_of(goal: AutoGoal, x: np.ndarray, residual: np.ndarray | None = None) -> Row:
    return np.array(goal.try_candidates(x.astype(np.float32), residual))


def train(
    codec: str, steps: int, scales: list[float], even: int = 0
) -> tuple[float, CompressorGroup]:
    """Two senders compress random tensors; returns the bits a value of all steps.

    even: first steps in which all values are equally large, as in Adam's first ones."""
    group, generator, numel = CompressorGroup(codec), np.random.default_rng(0), 10_000
    parts = [
        (scale, group.compressor(str(i), numel)) for _ in range(2) for i, scale in enumerate(scales)
    ]
    sent = 0
    for step in range(steps):
        for scale, part in parts:
            x = scale * generator.standard_t(4, numel).astype(np.float32)
            frame = part.encode(np.copysign(np.float32(scale), x) if step < even else x, step)
            sent += gradwire.inspect(frame)["payload_bytes"]
    return 8 * sent / (numel * len(parts) * steps), group


@pytest.mark.parametrize(("budget", "steps"), [(0.5, 200), (1.0, 80), (4.5, 80)])
def test_the_budget_holds_over_the_whole_training(budget: float, steps: int) -> None:
    bits, _ = train(f"auto:bits={budget},every=20", steps, [1.0, 0.3, 0.01])
    assert 0.95 * budget < bits < 1.05 * budget


def test_what_was_sent_beyond_the_budget_is_saved_later() -> None:
    goal, scales = "auto:bits=0.8,every=20", [1.0, 0.3]
    assert train(goal, 10, scales, even=10)[0] > 1.5
    assert train(goal, 200, scales, even=10)[0] < 1.05 * 0.8


def test_a_larger_s_sends_less() -> None:
    scales = [1.0, 0.3, 0.01]
    with pytest.raises(gradwire.GradwireError, match=r"take 0\.\d+ .* cost accuracy: s=1\.5"):
        train("auto:bits=0.25,every=20", 101, scales)
    assert train("auto:bits=0.25,s=1.75,every=20", 200, scales)[0] < 0.3


def test_the_larger_tensors_get_the_finer_codecs() -> None:
    _, group = train("auto:bits=1,every=10", 40, [1.0, 0.01])
    larger, smaller = group.tensors
    assert larger.bits > 1 > smaller.bits
    assert group.decisions == 7  # after 1, 2, 4, 8, 10, 20 and 30 of 39 steps


def test_the_first_step_predicts_the_next() -> None:
    """Codecs of so many bits have settled at once."""
    bits, group = train("auto:bits=4.5,every=20", 2, [1.0])
    assert group.tensors[0].bits == pytest.approx(bits, rel=0.05)


def test_a_budget_that_is_exceeded_is_remarked() -> None:
    _, group = train("auto:bits=0.02", 3, [1.0, 0.3])
    (remark,) = group.chooser.remarks("push")
    said = r"auto:bits=0.02, push: exceeds its limit, because the codecs that send least take 0\.\d"
    assert re.match(said, remark)
    assert train("auto:bits=1", 3, [1.0, 0.3])[1].chooser.remarks("push") == ()


def test_a_new_tensor_may_exceed_the_budget_at_first() -> None:
    chooser = Chooser("auto:bits=0.3")
    chooser.begin({"a": row_of(chooser.goal, VALUES)})
    chooser.decide({"a": row_of(chooser.goal, VALUES, 3 * VALUES)}, 100)
    chooser.begin({"late": row_of(chooser.goal, VALUES[:300])})
    assert set(chooser.tensors) == {"a", "late"}


def test_a_change_of_codec_keeps_the_residual() -> None:
    """All that was encoded was sent, or is in the residual."""
    group, generator = CompressorGroup("auto:bits=0.6,every=5"), np.random.default_rng(1)
    part = group.compressor("a", VALUES.size)
    owed, codecs = np.zeros(VALUES.size), set()
    for step in range(30):
        x = generator.standard_normal(VALUES.size).astype(np.float32)
        owed += x
        owed -= gradwire.decode(part.encode(x, step))
        codecs.add(part.codec)
        assert part.residual is not None
        np.testing.assert_allclose(part.residual, owed, atol=1e-4)
    assert len(codecs) > 2


def test_a_chooser_goes_on_from_its_state() -> None:
    goal = AutoGoal("auto:bits=0.7")
    rows = {"a": row_of(goal, VALUES), "b": row_of(goal, 0.2 * VALUES)}
    first, second = Chooser("auto:bits=0.7"), Chooser("auto:bits=0.7")
    first.begin(rows)
    second.load_state_dict(first.state_dict())
    later = {"a": row_of(goal, VALUES, VALUES), "b": row_of(goal, 0.2 * VALUES, VALUES)}
    first.decide(later, 1)
    second.decide(later, 1)
    assert first.state_dict() == second.state_dict()


def test_rows_without_values_change_nothing() -> None:
    chooser = Chooser("auto:bits=0.7")
    chooser.begin({"a": row_of(chooser.goal, VALUES)})
    before = chooser.state_dict()
    nan = np.where(np.arange(VALUES.size) == 5, np.nan, VALUES)
    assert not chooser.decide({"a": row_of(chooser.goal, nan)}, 1)
    assert chooser.state_dict() == before


def test_an_impossible_error_says_what_is_possible() -> None:
    """float16 rounds such small values coarsely, and bfloat16 has 8 bits."""
    chooser = Chooser("auto:error=0.0005")
    with pytest.raises(gradwire.GradwireError, match=r"leave out 0\.0016.* at least error=0\.0018"):
        chooser.begin({"a": row_of(chooser.goal, 1e-6 * VALUES)})
    chooser.begin({"a": row_of(chooser.goal, VALUES)})
    assert chooser.tensors["a"].codec == "fp16:ef=on"


def test_an_impossible_budget_says_what_is_possible() -> None:
    chooser = Chooser("auto:bits=0.1")
    rows = {str(i): row_of(chooser.goal, VALUES[:300]) for i in range(4)}
    chooser.begin(rows)  # residuals have not settled yet
    with pytest.raises(
        gradwire.GradwireError, match=r"send least take 0\.\d+ .* at least bits=0\."
    ):
        chooser.decide(rows, 100)


@pytest.mark.parametrize(
    ("remedy", "said"),
    [
        ("", r"Or allow coarser codecs, which cost accuracy: s=1\.5$"),
        ("Every=2.", r"\. Every=2\.$"),
    ],
)
def test_an_impossible_budget_has_the_remedy_that_helps(remedy: str, said: str) -> None:
    chooser = Chooser("auto:bits=0.1", remedy)
    with pytest.raises(gradwire.GradwireError, match=said):
        chooser.decide({"a": row_of(chooser.goal, VALUES[:300])}, 100)


def test_a_limit_that_was_kept_once_is_warned_of() -> None:
    chooser = Chooser("auto:error=0.001")
    chooser.begin({"a": row_of(chooser.goal, VALUES)})
    small = {"a": row_of(chooser.goal, 1e-7 * VALUES)}
    with pytest.warns(LimitWarning, match="can't be kept now"):
        chooser.decide(small, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chooser.decide(small, 2)


def test_where_no_goal_can_stand_the_error_says_where_it_can() -> None:
    for call in (
        lambda: gradwire.encode(VALUES, "auto:bits=1"),
        lambda: gradwire.Compressor("auto:bits=1", 5),
    ):
        with pytest.raises(gradwire.GradwireError, match="GradwireState, LocalSteps, Sharded"):
            call()
