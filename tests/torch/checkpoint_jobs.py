"""Functions that a test cluster runs with the ways of checkpoint_ways."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import gradwire.torch
from checkpoint_ways import OverBackend, Served, Training, Way, make
from gradwire.torch import PerRank
from training import CLASSES, TwoPaths, gather, load, make_model, save

FIRST, REST = 3, 4


@dataclass
class Held:
    """A state that was noted earlier, for PerRank."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Resumed:
    """The bytes of a rank's model at the end of trainings that were each interrupted once."""

    whole: bytes
    from_file: bytes
    from_distributed: bytes
    forgetful: bytes  # went on without residuals


def resume(way: Way, folder: str) -> Resumed:
    training = make(way)
    kept, state = train_and_note(training)
    values = {"whole": bytes_of(training)}
    training.close()
    file = Path(folder) / f"rank{dist.get_rank()}.pt"
    gradwire.torch.save({"kept": kept, "state": state}, file)
    read = torch.load(file, weights_only=True)
    save_checkpoint({"gradwire": PerRank(Held(state))}, checkpoint_id=f"{folder}/distributed")

    again = make(way)
    again.load(read["kept"], read["state"], FIRST)
    values["from_file"] = finish(again)

    again = make(way)
    load_checkpoint({"gradwire": PerRank(again.source)}, checkpoint_id=f"{folder}/distributed")
    again.take(read["kept"])
    again.version = FIRST
    values["from_distributed"] = finish(again)

    again = make(way)
    again.load(read["kept"], forget(read["state"]), FIRST)
    values["forgetful"] = finish(again)
    return Resumed(**values)


def train_and_note(training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains, and returns what was to be saved after the first steps."""
    if isinstance(training, Served):
        training.saves_at = FIRST
        training.run(FIRST + REST)
        assert training.saved is not None
        kept, *_ = gather(training.kept)  # a worker's: servers of gradients do not step
        return kept, training.saved
    training.run(FIRST)
    saved = load(save({"kept": training.keep(), "state": training.source.state_dict()}))
    training.run(REST)
    return saved["kept"], saved["state"]


def finish(training: Training) -> bytes:
    training.run(REST)
    found = bytes_of(training)
    training.close()
    return found


def bytes_of(training: Training) -> bytes:
    return b"".join(values.tobytes() for values in training.values().values())


def forget(state: dict[str, Any]) -> dict[str, Any]:
    """The same without residuals, and with other draws."""
    own = state.get("gradwire", state)
    other = {**own, "residuals": [], **({"iterations": 50} if "iterations" in own else {})}
    return state | {"gradwire": other} if "gradwire" in state else other


def train(way: Way) -> bytes:
    """What a rank saves after the first steps."""
    training = make(way)
    if isinstance(training, Served):
        kept, state = train_and_note(training)
    else:
        training.run(FIRST)
        if way.kind == "local":
            training.source.synchronize()
        kept, state = training.keep(), training.source.state_dict()
    training.close()
    return save({"kept": kept, "state": state})


@dataclass
class Moved:
    """A rank that goes on with others: its state after a step that adds nothing, what the step
    applied, and its model."""

    state: bytes
    applied: dict[str, np.ndarray]
    model: dict[str, np.ndarray]


def move(way: Way, kept: bytes, states: list[bytes]) -> Moved:
    """Loads a state of another world. kept: of one of its ranks."""
    training = make(way)
    if way.kind != "fsdp":  # PyTorch moves its own shards
        training.take(load(kept))
    training.source.load_state_dict(load(states[dist.get_rank()]))
    training.step(zero=True)
    state = training.after if isinstance(training, Served) else training.source.state_dict()
    moved = Moved(save(state), training.applied, training.values())
    training.close()
    return moved


def go_on(way: Way, states: list[bytes]) -> bytes:
    """The model after a further step of a training whose state is the whole training."""
    training = make(way)
    training.source.load_state_dict(load(states[dist.get_rank()]))
    training.step()
    found = bytes_of(training)
    training.close()
    return found


def load_distributed(way: Way, folder: str, states: list[bytes], target: dict[str, Any]) -> Any:
    """In the world that saved, saves the states; in another one, returns what PerRank loads."""
    if not target:
        held = Held(load(states[dist.get_rank()]))
        return save_checkpoint({"gradwire": PerRank(held)}, checkpoint_id=folder)
    held = Held({})
    load_checkpoint({"gradwire": PerRank(held, **target)}, checkpoint_id=folder)
    training = make(way)
    training.source.load_state_dict(held.state)
    return save(held.state)


def resume_backend(codec: str) -> tuple[bytes, bytes]:
    """A training over the backend "gradwire", which keeps nothing, without and with a restart."""
    gradwire.torch.register_backend(codec, min_numel=1000, name=f"gradwire{dist.get_world_size()}")
    group = dist.new_group(backend=f"gradwire{dist.get_world_size()}")
    whole = OverBackend(Way("backend"), group)
    whole.run(FIRST)
    kept = load(save(whole.keep()))
    whole.run(REST)
    again = OverBackend(Way("backend"), group)
    again.take(kept)
    again.version = FIRST
    again.run(REST)
    return bytes_of(whole), bytes_of(again)


# What is refused -------------------------------------------------------------------------------


def said_of_each(cases: list[tuple[Way, list[bytes], str]]) -> list[str]:
    """What each training says that loads a state. The states are those of two ranks."""
    rank = min(dist.get_rank(), 1)
    return [_said_of(way, states[rank], model) for way, states, model in cases]


def _said_of(way: Way, state: bytes, other_model: str) -> str:
    with mock.patch("checkpoint_ways.make_model", partial(make_other_model, other_model)):
        training = make(way)
    try:
        training.source.load_state_dict(load(state))
        if way.kind == "hook":  # it gets to know its parameters in the first step
            training.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        dist.barrier()  # no rank leaves while another still connects
        if not isinstance(training, Served):
            training.close()
    return "loaded"


class Renamed(TwoPaths):
    """`branch` is `twig`."""

    def __init__(self) -> None:
        super().__init__()
        self.twig = self.branch
        del self.branch

    def forward(self, x: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        result: torch.Tensor = self.twig(torch.relu(self.second(torch.relu(self.first(x)))))
        return result[:, :CLASSES]


def make_other_model(what: str) -> TwoPaths:
    if what == "renamed":
        return Renamed()
    model = make_model()
    if what == "wider":
        model.branch = nn.Linear(144, 32)
    return model


def states_of(ways: list[Way]) -> list[bytes]:
    return [_state_of(way) for way in ways]


def _state_of(way: Way) -> bytes:
    training = make(way)
    state = save(training.source.state_dict())
    if not isinstance(training, Served):
        if way.kind == "hook":
            training.step()
            state = save(training.source.state_dict())
        training.close()
    return state


def states_between(way: Way) -> bytes:
    """A state between two exchanges of LocalSteps."""
    training = make(way)
    training.run(FIRST)
    state = save(training.source.state_dict())
    training.close()
    return state
