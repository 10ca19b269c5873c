"""gradwire.contrib.way, which the adapters of frameworks share, without any framework."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.contrib.way import Way
from gradwire.torch import loopback


def start(**options: Any) -> tuple[Way, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 20)
    way = Way("test", "small", options)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    optimizer = way.attach(DistributedDataParallel(model), optimizer)
    return way, model


def save_late(folder: Path) -> list[str]:
    """The files after a save to a folder that rank 0 makes after the others have saved."""
    way, _ = start(every=2)
    checkpoint = folder / "made later" / "last.ckpt"
    if dist.get_rank() == 0:
        time.sleep(0.5)
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()
    way.save(checkpoint)
    dist.barrier()
    return sorted(file.name for file in checkpoint.parent.iterdir())


def resume_otherwise(folder: Path, first: dict[str, Any], then: dict[str, Any]) -> str:
    start(**first)[0].save(folder)
    way, _ = start(**then)
    try:
        way.restore([folder])
    except ValueError as error:
        return str(error)
    return ""


def resume_from_another_file(folder: Path, kind: str) -> str:
    way, _ = start(every=2)
    if kind == "pointer":
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
        way.file_of(folder).write_text(text)
    else:
        torch.save({"a": 1}, way.file_of(folder))
    with pytest.raises(ValueError, match="no state of gradwire") as caught:
        way.restore([folder])
    way.detach()
    return str(caught.value)


def resume_from_a_part(folder: Path, size: int) -> str:
    """What is said of a file that was not copied whole."""
    way, _ = start()
    way.save(folder)
    os.truncate(way.file_of(folder), size)
    with pytest.raises(ValueError, match=r"gradwire_\d\.pt: ") as caught:
        way.restore([folder])
    return str(caught.value)


def load_without(folder: Path, options: dict[str, Any], begins: bool) -> str:
    """What is said of a checkpoint without files of gradwire. begins: it is loaded before the way
    is attached."""
    saved = torch.nn.Linear(20, 20).state_dict()
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    way = Way("test", "small", options)
    if begins:
        model.module.load_state_dict(saved)
    way.attach(model, torch.optim.AdamW(model.parameters()))
    if not begins:
        model.module.load_state_dict(saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            way.restore([folder])
        except ValueError as error:
            return str(error)
    return str(caught[0].message)


def attach_twice(first: dict[str, Any], then: dict[str, Any]) -> str:
    """What is said when the second adapter is given what the first one returned."""
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    optimizer = Way("first", "small", first).attach(model, optimizer)
    try:
        Way("second", "small", then).attach(model, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def train_without() -> tuple[str, bool]:
    """What is said of options that can't be, and whether DDP still averages then."""
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    way = Way("test", "small", {"every": 2, "late_momentum": True})
    try:
        way.attach(model, torch.optim.SGD(model.parameters()))
    except ValueError as error:
        return str(error), model.require_backward_grad_sync
    return "", False


def test_a_way_that_is_refused_leaves_the_model_as_it_was() -> None:
    for said, averages in loopback.run(2, lambda rank: train_without()):
        assert said
        assert averages


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"every": 2}, {"every": 2}, "second takes a model and its optimizer once"),
        ({"every": 2}, {}, "second takes a model and its optimizer once"),
        ({}, {}, "this module has gradwire_hook already"),
    ],
)
def test_a_training_is_compressed_once(
    cluster: Cluster, first: dict[str, Any], then: dict[str, Any], said: str
) -> None:
    for message in cluster.run(2, attach_twice, first, then):
        assert said in message


def test_a_rank_need_not_wait_for_the_folder(cluster: Cluster, tmp_path: Path) -> None:
    files = ["last.ckpt", "last.ckpt.gradwire_0.pt", "last.ckpt.gradwire_1.pt"]
    assert cluster.run(2, save_late, tmp_path) == [files, files]


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"every": 2}, {"every": 3}, "every: the state has 2, this rank has 3"),
        ({"every": 2}, {}, "of a LocalSteps, this is a GradwireState"),
        ({}, {"every": 2}, "no values of bias, which LocalSteps did not train"),
    ],
)
def test_a_state_of_another_way_is_named_with_what_to_do(
    cluster: Cluster, tmp_path: Path, first: dict[str, Any], then: dict[str, Any], said: str
) -> None:
    for rank, message in enumerate(cluster.run(2, resume_otherwise, tmp_path, first, then)):
        assert message.startswith(f"{tmp_path}/gradwire_{rank}.pt: ")
        assert said in message
        assert message.endswith(
            "Remove this file of every rank to go on from the checkpoint without residuals"
        )


@pytest.mark.parametrize("options", [{"every": 2}, {}])
@pytest.mark.parametrize("begins", [True, False])
def test_a_training_without_files_goes_on_where_it_can(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any], begins: bool
) -> None:
    """LocalSteps has the model that it was made with: it raised in the next step."""
    goes_on = begins or not options
    for said in cluster.run(2, load_without, tmp_path, options, begins):
        assert said.startswith("no state of gradwire for the loaded model in ")
        assert ("the training goes on without residuals" in said) == goes_on
        assert ("copy the files of all ranks, or remove them" in said) == goes_on
        assert ("load it before LocalSteps is made" in said) != goes_on


@pytest.mark.parametrize("kind", ["pointer", "other"])
def test_another_file_is_named(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """PyTorch's error names no file, and advises to unpickle it."""
    for rank, message in enumerate(cluster.run(2, resume_from_another_file, tmp_path, kind)):
        assert message == (
            f"{tmp_path}/gradwire_{rank}.pt: it is no state of gradwire; without `git lfs pull` it "
            "may be a pointer. Remove this file of every rank to go on from the checkpoint without "
            "residuals"
        )


@pytest.mark.parametrize("size", [0, 500])
def test_a_file_that_was_cut_is_named(cluster: Cluster, tmp_path: Path, size: int) -> None:
    """PyTorch's error names no file."""
    for rank, message in enumerate(cluster.run(2, resume_from_a_part, tmp_path, size)):
        assert message.startswith(f"{tmp_path}/gradwire_{rank}.pt: it cannot be read: ")
        assert message.endswith(
            "Remove this file of every rank to go on from the checkpoint without residuals"
        )
