"""GradwireCallback in Hugging Face's Trainer, on two ranks (trainer_jobs.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="scripts/test.sh recipes installs it")

from transformers import Trainer, TrainingArguments

from gradwire.contrib.transformers import GradwireCallback
from torchrun import run_program

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("trainer")
    run_program(Path(__file__).with_name("trainer_jobs.py"), 2, arguments=[str(folder)])
    return [json.loads((folder / f"found_{rank}.json").read_text("utf-8")) for rank in range(2)]


@pytest.fixture
def found(ranks: list[Found]) -> Found:
    return ranks[0]


def test_all_ranks_end_with_the_same_model(ranks: list[Found]) -> None:
    names = [n for n, entry in ranks[0].items() if isinstance(entry, dict) and "model" in entry]
    assert len(names) >= 20
    assert [n for n in names if ranks[0][n]["model"] != ranks[1][n]["model"]] == []


def test_the_hook_with_raw_is_ddp(found: Found) -> None:
    assert found["hook raw"]["model"] == found["ddp"]["model"]
    assert found["hook raw"]["losses"] == found["ddp"]["losses"]
    assert found["hook raw"]["steps"] == 24


def test_the_default_suits_adamw(found: Found) -> None:
    assert found["hook default"]["codec"].startswith("int8")
    assert found["hook default"]["losses"] == pytest.approx(found["ddp"]["losses"], abs=0.02)


@pytest.mark.parametrize("name", ["local", "diloco"])
def test_local_steps_are_those_written_by_hand(found: Found, name: str) -> None:
    """With gradient accumulation, clipping and a schedule of learning rates."""
    assert found[name]["model"] == found[f"{name} by hand"]["model"]
    assert found[name]["losses"][-1] < found[name]["losses"][0]


def test_no_gradient_is_averaged_with_local_steps(found: Found) -> None:
    assert found["local"]["ratio"] > 50
    assert found["gradients equal"] == [False] * 24


def test_arguments_of_the_trainer_are_put_back(found: Found) -> None:
    assert found["local"]["max_grad_norm"] == 0.5
    assert found["local"]["average_tokens"] is True


@pytest.mark.parametrize("way", ["local", "hook"])
def test_evaluating_and_saving_changes_nothing(found: Found, way: str) -> None:
    assert found[f"{way} loud"]["model"] == found[f"{way} quiet"]["model"]


@pytest.mark.parametrize("way", ["local", "hook"])
@pytest.mark.parametrize("where", ["often", "elsewhere"])
def test_a_resumed_training_ends_with_the_same_bits(found: Found, way: str, where: str) -> None:
    """With dropout. `elsewhere`: the checkpoint is not in output_dir."""
    assert found[f"{way} {where}"]["model"] == found[f"{way} often at first"]["model"]
    assert "ResidualDroppedWarning" not in found[f"{way} {where}"]["warnings"]


@pytest.mark.parametrize("way", ["local", "hook"])
def test_without_its_files_a_training_goes_on_and_says_so(found: Found, way: str) -> None:
    assert "ResidualDroppedWarning" in found[f"{way} without"]["warnings"]
    assert found[f"{way} without"]["model"] != found[f"{way} often at first"]["model"]


def test_a_checkpoint_has_the_weights_of_the_last_exchange(found: Found) -> None:
    """Steps 4 to 11, with exchanges after 5 and 10; the training ends after 11."""
    saved = found["saves"]["saved"]
    assert len(set(saved)) == 4
    assert len(set(saved[1:6])) == 1
    assert found["asked"]["saved"] == saved[3]


def test_a_hyperparameter_search_has_a_folder_for_each_run(found: Found) -> None:
    folders = [f"run-3/checkpoint-{step}" for step in (8, 16, 24)]
    assert found["search"] == sorted(f"{f}/gradwire_{rank}.pt" for f in folders for rank in (0, 1))


def test_all_ranks_end_with_one_average(ranks: list[Found]) -> None:
    """Each had the average of its own weights."""
    first, second = (rank["average at the end"]["model"] for rank in ranks)
    assert first == second != ranks[0]["local quiet"]["model"]


def test_the_best_model_stays_loaded(found: Found) -> None:
    assert found["best"]["checkpoint"] == "checkpoint-8"
    assert found["best"]["is loaded"] is True
    assert found["stopped"]["steps"] == 16


@pytest.mark.parametrize("way", ["local", "hook"])
def test_a_trainer_trains_again(found: Found, way: str) -> None:
    losses = found[f"{way} again"]["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_other_ways_than_ddp_are_refused(found: Found, name: str) -> None:
    assert f"this Trainer has {name}" in found[name]


def test_two_callbacks_are_refused(found: Found) -> None:
    assert "two GradwireCallbacks" in found["two"]


def test_a_process_without_torchrun_is_refused(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(1, 1)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    data = [{"x": torch.ones(1)}]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[GradwireCallback(every=2)])
    with pytest.raises(RuntimeError, match="start the program with torchrun"):
        trainer.train()


def test_options_are_checked_at_once() -> None:
    with pytest.raises(TypeError, match="evry"):
        GradwireCallback(evry=30)
    with pytest.raises(TypeError, match=r"clip_norm is for LocalSteps, and GradwireCallback takes"):
        GradwireCallback(clip_norm=1.0)
    with pytest.raises(RuntimeError, match="when the training begins"):
        GradwireCallback().stats()
