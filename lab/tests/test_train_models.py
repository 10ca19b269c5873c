"""The models have the papers' sizes; a seed always gives the same weights, and drops the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from safetensors.torch import save_file

from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire_lab.train import models
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import IMAGES, MODELS
from gradwire_lab.train.strategy import seed_dropout


@pytest.mark.parametrize(
    ("name", "channels", "side", "parameters"),
    [
        ("mlp", 1, 28, 400_906),
        ("resnet8", 1, 28, 19_074),
        ("lenet", 1, 28, 61_706),
        ("lenet", 1, 32, 61_706),
        ("lenet", 3, 32, 62_006),
        ("resnet20", 3, 32, 269_722),
        ("resnet20", 1, 28, 269_434),
        ("resnet56", 3, 32, 853_018),
        ("resnet110", 3, 32, 1_727_962),
    ],
)
def test_sizes(name: str, channels: int, side: int, parameters: int) -> None:
    model = models.build(name, channels, side, 10, seed=0)
    assert models.parameter_count(model) == parameters
    logits = model(torch.zeros(2, channels, side, side))
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_a_recipe_are_those_that_can_be_excluded(name: str) -> None:
    shape = (1, 28, 10) if MODELS[name].data == IMAGES else (256, 64)
    model = models.build(name, *shape, seed=0, width=32)
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    layers = MODELS[name].layers
    all_of_them = ExchangeSettings(exclude_last=layers).with_last_excluded(shapes)
    assert len(all_of_them.last_excluded) == layers
    with pytest.raises(ValueError, match=f"the model has {layers} layers"):
        ExchangeSettings(exclude_last=layers + 1).with_last_excluded(shapes)


def test_a_block_that_shrinks_keeps_every_second_pixel() -> None:
    block = models.BasicBlock(4, 8, stride=2)
    images = torch.arange(4.0 * 6 * 6).reshape(1, 4, 6, 6)
    kept = block.shortcut(images)
    assert kept.shape == (1, 8, 3, 3)
    assert torch.equal(kept[:, 2:6], images[:, :, ::2, ::2])
    assert not kept[:, :2].any()
    assert not kept[:, 6:].any()


@pytest.mark.parametrize("name", ["lenet", "resnet20"])
def test_weights_come_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = models.build(name, 1, 28, 10, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again = models.build(name, 1, 28, 10, seed=1)
    other = models.build(name, 1, 28, 10, seed=2)

    def weights(model: torch.nn.Module) -> torch.Tensor:
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_what_is_dropped_comes_from_seed_step_and_worker() -> None:
    drawn = {}
    for place in [(3, 7, 1), (3, 7, 2), (3, 8, 1), (4, 7, 1)]:
        seed_dropout(*place)
        drawn[place] = torch.rand(100)
        # Runs that are there already are repeated to the bit.
        torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        assert torch.equal(torch.rand(100), drawn[place])
    assert len({tuple(values.tolist()) for values in drawn.values()}) == len(drawn)


BEGUN: list[tuple[Any, int]] = [
    (("resnet20", 3, 32, 10), 1),
    (("resnet20", 3, 32, 10), 2),
    (("resnet20", 1, 32, 10), 2),
]


def test_a_model_begins_with_a_file(tmp_path: Path) -> None:
    saved, model, other = (models.build(*given, seed=seed) for given, seed in BEGUN)
    path = tmp_path / "model.safetensors"
    save_file(saved.state_dict(), path)
    models.load(model, path)
    for name, values in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], values), name
    with pytest.raises(TrainError, match=r"conv1\.weight is \[16, 3, 3, 3\] F32 there, and"):
        models.load(other, path)
    with pytest.raises(TrainError, match=r"--init: .*other\.safetensors"):
        models.load(model, tmp_path / "other.safetensors")
    save_file({n: v.double() for n, v in saved.state_dict().items()}, path)
    with pytest.raises(TrainError, match=r"F64 there, and .* F32 here"):
        models.load(model, path)
