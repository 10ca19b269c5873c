"""gradwire.contrib.lightning on two ranks (lightning_jobs.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="scripts/test.sh recipes installs it")

from gradwire.contrib.lightning import GradwireStrategy
from torchrun import run_program

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("lightning")
    run_program(Path(__file__).with_name("lightning_jobs.py"), 2, arguments=[str(folder)])
    return [json.loads((folder / f"found_{rank}.json").read_text("utf-8")) for rank in range(2)]


@pytest.fixture
def found(ranks: list[Found]) -> Found:
    return ranks[0]


def test_all_ranks_end_with_the_same_model(ranks: list[Found]) -> None:
    names = [n for n, entry in ranks[0].items() if isinstance(entry, dict)]
    assert len(names) >= 13
    assert [n for n in names if ranks[0][n]["model"] != ranks[1][n]["model"]] == []
    names = [n for n in ranks[0] if n.startswith("fabric")]
    assert len(names) == 10
    assert [n for n in names if ranks[0][n] != ranks[1][n]] == []


def test_the_hook_with_raw_is_ddp(found: Found) -> None:
    assert found["hook raw"]["model"] == found["ddp"]["model"]
    assert found["hook raw"]["losses"] == found["ddp"]["losses"]
    assert found["hook raw"]["steps"] == 20
    assert found["fabric hook raw"] == found["fabric ddp"]


def test_local_steps_are_those_written_by_hand(found: Found) -> None:
    """With clipping and a schedule of learning rates, with gradient accumulation, and in Fabric."""
    assert found["local"]["model"] == found["local by hand"]["model"]
    assert found["accumulated"]["model"] == found["accumulated by hand"]["model"]
    assert found["fabric local"] == found["fabric by hand"]
    assert found["local"]["clip"] == 0.5


def test_no_gradient_is_averaged_with_local_steps(found: Found) -> None:
    assert found["local"]["differs"] == [True] * 20
    assert found["hook raw"]["differs"] == [False] * 20


@pytest.mark.parametrize("way", ["local", "hook"])
def test_validating_and_saving_changes_nothing(found: Found, way: str) -> None:
    assert found[f"{way} whole"]["model"] == found[f"{way} quiet"]["model"]


def test_callbacks_may_validate_other_weights(found: Found) -> None:
    assert found["averages"]["validated"] == found["averages"]["of"]
    assert len(found["averages"]["of"]) == 4
    assert found["averages"]["model"] == found["local quiet"]["model"]


def test_all_ranks_end_with_one_average(ranks: list[Found]) -> None:
    """Each had the average of its own weights."""
    first, second = (rank["average at the end"]["model"] for rank in ranks)
    assert first == second != ranks[0]["local quiet"]["model"]


def test_what_looks_when_the_training_ends_sees_its_model(ranks: list[Found]) -> None:
    for rank in ranks:
        for name in ("local", "hook raw", "local whole"):
            assert rank[name]["ended"] == rank[name]["model"]


def test_all_ranks_validate_the_same_weights(ranks: list[Found]) -> None:
    first, second = (rank["local whole"]["validated"] for rank in ranks)
    assert first == second
    assert len(first) == len(set(first)) == 4


@pytest.mark.parametrize("way", ["local", "hook"])
def test_a_resumed_training_ends_with_the_same_bits(found: Found, way: str) -> None:
    assert found[f"{way} resumed"]["model"] == found[f"{way} whole"]["model"]
    assert "ResidualDroppedWarning" not in found[f"{way} resumed"]["warnings"]
    assert found[f"fabric {way} resumed"] == found[f"fabric {way} whole"]


@pytest.mark.parametrize("way", ["local", "hook"])
def test_without_its_files_a_training_goes_on_and_says_so(found: Found, way: str) -> None:
    assert "ResidualDroppedWarning" in found[f"{way} without"]["warnings"]
    assert found[f"{way} without"]["model"] != found[f"{way} whole"]["model"]


def test_a_checkpoint_has_the_weights_of_the_last_exchange(found: Found) -> None:
    """That of step 10 those of step 9."""
    assert found["saved"] == found["nine"]["model"]
    assert found["fabric saved"] == found["fabric nine"]


def test_a_checkpoint_takes_its_files_along_when_it_is_removed(found: Found) -> None:
    checkpoint, first, second = found["files"]
    assert (first, second) == (f"{checkpoint}.gradwire_0.pt", f"{checkpoint}.gradwire_1.pt")


def test_a_removed_link_leaves_the_files_of_its_checkpoint(found: Found) -> None:
    checkpoints = [f"step={step}.ckpt" for step in (5, 10, 15)]
    files = [f"{name}.gradwire_{rank}.pt" for name in checkpoints for rank in range(2)]
    assert found["linked files"] == sorted(["step=15-last.ckpt", *checkpoints, *files])


def test_a_second_model_without_its_state_is_said(found: Found) -> None:
    (said,) = found["both"]
    assert "both.ckpt has 2 optimizers" in said


def test_what_can_not_be_is_refused(found: Found) -> None:
    assert "takes one optimizer, not 2" in found["two"]
    assert "fabric.setup(model, optimizer)" in found["none"]
    with pytest.raises(TypeError, match="clip_norm is for LocalSteps, and GradwireStrategy takes"):
        GradwireStrategy(clip_norm=1.0)
