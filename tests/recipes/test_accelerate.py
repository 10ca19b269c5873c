"""gradwire.contrib.accelerate on two ranks (accelerate_jobs.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="scripts/test.sh recipes installs it")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from gradwire.contrib.accelerate import compress
from torchrun import run_program

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("accelerate")
    run_program(Path(__file__).with_name("accelerate_jobs.py"), 2, arguments=[str(folder)])
    return [json.loads((folder / f"found_{rank}.json").read_text("utf-8")) for rank in range(2)]


def test_all_ranks_end_with_the_same_model(ranks: list[Found]) -> None:
    first, second = ({**rank, "agreed": rank["agreed"][1], "ratio": 0} for rank in ranks)
    assert first == second


def test_the_hook_with_raw_is_ddp(ranks: list[Found]) -> None:
    assert ranks[0]["hook raw"] == ranks[0]["ddp"]


@pytest.mark.parametrize("name", ["local", "local scaled"])
def test_local_steps_are_those_written_by_hand(ranks: list[Found], name: str) -> None:
    """With a schedule of learning rates; `scaled`: and with a GradScaler."""
    assert ranks[0][name] == ranks[0]["local by hand"]
    assert ranks[0]["ratio"] > 10


@pytest.mark.parametrize("way", ["local", "hook"])
def test_a_resumed_training_ends_with_the_same_bits(ranks: list[Found], way: str) -> None:
    """save_state and load_state in the middle, for `local` between two exchanges."""
    assert ranks[0][f"{way} resumed"] == ranks[0][f"{way} whole"]


def test_the_agreed_weights_are_there_for_a_while(ranks: list[Found]) -> None:
    (before, agreed, after), (others, _, _) = (rank["agreed"] for rank in ranks)
    assert before == after
    assert len({before, agreed, others}) == 3


def test_a_checkpoint_has_the_weights_of_the_last_exchange(ranks: list[Found]) -> None:
    assert ranks[0]["saved is agreed"] is True


def test_hooks_that_save_the_model_see_the_agreed_weights(ranks: list[Found]) -> None:
    """They saw one rank's own, and save_state ended with IndexError."""
    first, second, agreed = ranks[0]["hooks"]
    assert first == second == agreed == ranks[1]["hooks"][0]


def test_detach_gives_the_optimizer_back(ranks: list[Found]) -> None:
    assert ranks[0]["detached"] == "AdamW"


def test_a_way_that_is_detached_takes_no_part_in_loads(ranks: list[Found]) -> None:
    """It raised KeyError: 'param_groups'."""
    assert ranks[0]["detached loads"] == ranks[1]["detached loads"]


def test_two_models_are_resumed(ranks: list[Found]) -> None:
    """The state of the second had taken the place of that of the first."""
    assert ranks[0]["two"] == [[True, True], [True, True]]


def test_what_is_not_prepared_is_refused(ranks: list[Found]) -> None:
    assert "that accelerator.prepare returned" in ranks[0]["not prepared"]
    assert "without DistributedDataParallel" in ranks[0]["plain model"]


def test_a_second_call_is_refused(ranks: list[Found]) -> None:
    assert "gradwire.contrib.accelerate.compress puts a hook into" in ranks[0]["twice"]
    assert "compress takes a model and its optimizer once" in ranks[0]["twice local"]


def test_a_process_without_torchrun_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    linear = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="start the program with torchrun"):
        compress(accelerator, model, optimizer, every=2)


def test_a_checkpoint_of_a_compiled_model_has_the_agreed_weights(tmp_path: Path) -> None:
    """On GPUs Accelerate compiles the model in DistributedDataParallel, and saves that one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        accelerator = Accelerator(cpu=True)
        ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = accelerator.prepare(torch.optim.SGD(ddp.parameters(), lr=1.0))
        accelerator._models = [ddp]
        model: Any = torch.compile(ddp)
        way = compress(accelerator, model, optimizer, every=5)
        ddp(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        accelerator.save_state(str(tmp_path / "saved"))
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert torch.equal(saved["module.weight"], way.exchange.anchors()["weight"])
        way.detach()
    finally:
        dist.destroy_process_group()
