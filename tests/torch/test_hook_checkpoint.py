"""Residuals survive a restart, another bucketing, and another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import gradwire.torch
import jobs
from cluster import Cluster
from gradwire.torch import GradwireState, PerRank
from owed import owed_in, total_owed
from training import Options, digest, load, loss_of, make_model, save
from ways import CUT_ONCE, build

WORLD = 4
STATE = {"codec": "3lc:s=1.75"}


def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster) -> None:
    runs = [Options(9, STATE, CUT_ONCE), Options(5, STATE, CUT_ONCE)]
    ranks = cluster.run(WORLD, jobs.train_each, runs)
    whole, stopped = ranks[0]
    residuals = [rank[1].residuals for rank in ranks]
    rest = Options(4, STATE, CUT_ONCE, start=5, residuals=residuals, weights=stopped.weights)
    forgetful = Options(4, STATE | {"start_iter": 0}, CUT_ONCE, start=5, weights=stopped.weights)
    for continued, without_residuals in cluster.run(WORLD, jobs.train_each, [rest, forgetful]):
        assert continued.digest == whole.digest
        assert without_residuals.digest != whole.digest


def test_new_buckets_lose_nothing(cluster: Cluster) -> None:
    """The restart has buckets of another size, so other ranks own the values."""
    small, large = {"bucket_cap_mb": 0.02}, {"bucket_cap_mb": 0.2}
    trained = cluster.run(WORLD, jobs.train_each, [Options(5, STATE, small)])
    residuals = [rank[0].residuals for rank in trained]
    placed = cluster.run(WORLD, jobs.place_residuals, Options(1, STATE, large, residuals=residuals))
    assert_same_total([load(saved) for saved in residuals], placed)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_reshard_keeps_what_is_owed(cluster: Cluster, world_size: int) -> None:
    trained = cluster.run(WORLD, jobs.train_each, [Options(5, STATE)])
    states = [load(rank[0].residuals) for rank in trained]
    resharded = gradwire.torch.reshard(states, world_size)
    assert [state["rank"] for state in resharded] == list(range(world_size))
    before, through = owed_by(states), owed_by(resharded)
    for name, value in before.items():
        np.testing.assert_allclose(through[name], value, rtol=1e-6, atol=1e-7 * abs(value).max())
    options = Options(1, STATE, residuals=[save(state) for state in resharded])
    assert_same_total(states, cluster.run(world_size, jobs.place_residuals, options))


def assert_same_total(before: list[dict[str, Any]], placed: list[jobs.Placed]) -> None:
    """All residuals are still there, or were applied; by a lone rank, all were."""
    after = owed_by([rank.state for rank in placed])
    assert bool(after) == (len(placed) > 1)
    for name, owed in owed_by(before).items():
        assert owed.any()
        found = after.get(name, 0.0) + placed[0].applied[name]
        np.testing.assert_allclose(found, owed, rtol=1e-5, atol=1e-6 * abs(owed).max())


@pytest.fixture(scope="module")
def residuals(cluster: Cluster) -> list[bytes]:
    return [rank[0].residuals for rank in cluster.run(WORLD, jobs.train_each, [Options(5, STATE)])]


def save_in_checkpoint(folder: str, residuals: list[bytes]) -> bytes:
    state = GradwireState(STATE["codec"])
    state.load_state_dict(load(residuals[dist.get_rank()]))
    save_checkpoint({"gradwire": PerRank(state)}, checkpoint_id=folder)
    return save(state.state_dict())


def load_from_checkpoint(folder: str, saved_world_size: int) -> bytes:
    state = GradwireState(STATE["codec"])
    saved = {"gradwire": PerRank(state, saved_world_size=saved_world_size)}
    load_checkpoint(saved, checkpoint_id=folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert list(saved["gradwire"].state_dict()) == [f"rank {rank} of {size}"]
    return save(state.state_dict())


def refusal(load: Callable[[], Any]) -> str:
    try:
        load()
    except (CheckpointException, ValueError) as error:
        return str(error)
    return ""


def why_not_loaded(folder: str) -> str:
    return refusal(lambda: load_from_checkpoint(folder, dist.get_world_size()))


def test_distributed_checkpoint_keeps_each_ranks_state(
    cluster: Cluster, residuals: list[bytes], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    saved = cluster.run(WORLD, save_in_checkpoint, folder, residuals)
    assert len(set(saved)) == WORLD
    assert cluster.run(WORLD, load_from_checkpoint, folder, WORLD) == saved
    fewer = cluster.run(2, load_from_checkpoint, folder, WORLD)
    before, after = (owed_by([load(state) for state in states]) for states in (saved, fewer))
    for name, owed in before.items():
        np.testing.assert_allclose(after[name], owed, rtol=1e-6, atol=1e-7 * abs(owed).max())
    for said in cluster.run(2, why_not_loaded, folder):
        assert "Missing key in checkpoint state_dict: gradwire.rank 1 of 2" in said


def why_not_loaded_without_per_rank(folder: str, residuals: list[bytes]) -> str:
    """What a rank says whose states were saved under one name."""
    state = GradwireState(STATE["codec"])
    state.load_state_dict(load(residuals[dist.get_rank()]))
    save_checkpoint({"gradwire": state}, checkpoint_id=folder)
    return refusal(lambda: load_checkpoint({"gradwire": state}, checkpoint_id=folder))


def test_states_that_were_saved_under_one_name_are_refused_by_other_ranks(
    cluster: Cluster, residuals: list[bytes], tmp_path: Path
) -> None:
    """torch.distributed.checkpoint keeps one rank's of equal names; PerRank gives each its own."""
    said = cluster.run(WORLD, why_not_loaded_without_per_rank, str(tmp_path), residuals)
    kept = [r for r in range(WORLD) if any(f"the state is that of rank {r} of" in t for t in said)]
    assert len(kept) == 1
    for rank, text in enumerate(said):
        refused = f"the state is that of rank {kept[0]} of {WORLD}, this is rank {rank} of" in text
        assert refused or rank == kept[0], (rank, text)


def local_steps_through_checkpoint(folder: str) -> tuple[str, str]:
    """The models after seven steps, without an interruption and with one after three."""
    digests = []
    for act in (save_checkpoint, load_checkpoint):
        training = build("LocalSteps", make_model(), codec="3lc:s=1.75")
        training.run(3 if act is save_checkpoint else 0, loss_of)
        act({n: PerRank(part) for n, part in training.parts().items()}, checkpoint_id=folder)
        training.steps = 3
        training.run(4, loss_of)
        digests.append(digest(training.model))
        training.close()
    return digests[0], digests[1]


def test_distributed_checkpoint_keeps_local_steps(cluster: Cluster, tmp_path: Path) -> None:
    ranks = cluster.run(2, local_steps_through_checkpoint, str(tmp_path))
    assert all(whole == resumed for whole, resumed in ranks), "its result is another one"
    assert ranks[0] != ranks[1], "the last step is not exchanged"


def test_reshard_to_the_same_world_changes_nothing() -> None:
    states = [_state(rank, 2) for rank in range(2)]
    assert gradwire.torch.reshard(states, 2) == states


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([(0, 2)], "states of all ranks"),
        ([(1, 2), (0, 2)], "states of all ranks"),
        ([(0, 3), (1, 3)], "states of all ranks"),
    ],
)
def test_reshard_refuses_an_incomplete_set(states: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradwire.torch.reshard([_state(*place) for place in states], 4)


def test_reshard_refuses_states_of_different_moments() -> None:
    states = [_state(0, 2), _state(1, 2) | {"iterations": 6}]
    with pytest.raises(ValueError, match="one training at one step: iterations"):
        gradwire.torch.reshard(states, 3)


def test_loading_another_ranks_state_is_refused() -> None:
    state = gradwire.torch.GradwireState()
    with pytest.raises(ValueError, match="rank 1 of 2"):
        state.load_state_dict(_state(1, 2))
    with pytest.raises(ValueError, match="format"):
        state.load_state_dict({"something": "else"})


def _state(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "format": 1,
        "codec": "3lc",
        "rank": rank,
        "world_size": world_size,
        "iterations": 5,
        "loss_scale": None,
        "residuals": [
            {"kind": "push", "name": "w", "offset": 0, "values": torch.ones(4) * (rank + 1)}
        ],
    }


def owed_by(states: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return total_owed([owed_in(state) for state in states])
