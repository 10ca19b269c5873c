"""gradwire.contrib.vllm against a stand-in with the interface of vLLM's documentation."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import vllm_standin
from gradwire.weights import Publisher, WeightsError

ROOT = Path(__file__).resolve().parents[2]


class Served(nn.Module):
    """A model as vLLM has them: load_weights takes tensors by their names in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(50, 40, dtype=torch.bfloat16)
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.fails = False

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if self.fails:
            raise RuntimeError("out of memory")
        for name, values in weights:
            self.get_parameter(name).copy_(values)
        return set()


@pytest.fixture(autouse=True)
def vllm() -> None:
    """Makes the backend known as vLLM does with plugins: by their entry points, more than once."""
    vllm_standin.install()
    vllm_standin.calls.clear()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["gradwire"].partition(":")
    for _ in range(2):
        getattr(import_module(module), name)()


def make_engine(store: Path, model: Served, **info: str) -> Any:
    config = SimpleNamespace(parallel_config=None, model_config="config")
    backend = SimpleNamespace(backend="gradwire")
    factory = vllm_standin.WeightTransferEngineFactory
    engine = factory.create_engine(backend, config, torch.device("cpu"), model)
    engine.init_transfer_engine(engine.parse_init_info({"store": str(store), **info}))
    return engine


def test_other_models_of_the_worker_are_refused(tmp_path: Path) -> None:
    """vLLM asks before it has an engine update a draft model or adapters."""
    engine = make_engine(tmp_path, Served())
    assert not engine.supports_draft_weight_update
    assert not engine.supports_lora_weight_update


def update(engine: Any, version: int) -> list[str]:
    """What vLLM does for an update; how the weights were loaded."""
    vllm_standin.calls.clear()
    engine.start_weight_update()
    engine.update_weights({"version": version})
    engine.finish_weight_update()
    return list(vllm_standin.calls)


@torch.no_grad()
def change(model: Served) -> None:
    model.layer.weight.view(torch.int16).view(-1)[::17] += 1


def assert_equal(served: Served, model: Served) -> None:
    for name, values in model.state_dict().items():
        assert served.state_dict()[name].view(torch.int16).equal(values.view(torch.int16)), name


def test_a_worker_follows_by_sparse_patches(tmp_path: Path) -> None:
    model, served = Served(), Served()
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    for version in range(1, 5):
        change(model)
        publisher.publish(model)
        assert update(engine, version) == (["begin", "end"] if version == 1 else ["patches"])
        assert_equal(served, model)
    assert update(engine, 4) == []
    change(model)
    engine.trainer_send_weights(iter(model.state_dict().items()), publisher)
    assert update(engine, 5) == ["patches"]
    assert_equal(served, model)
    engine.shutdown()
    with pytest.raises(WeightsError, match="init_weight_transfer_engine"):
        update(engine, 5)


def test_a_worker_that_has_the_base_begins_with_patches(tmp_path: Path) -> None:
    model = Served()
    base = tmp_path / "base.safetensors"
    safetensors.torch.save_file(dict(model.state_dict()), base)
    served = copy.deepcopy(model)
    publisher = Publisher(tmp_path / "store", base=base)
    engine = make_engine(tmp_path / "store", served, base=str(base))
    for version in (1, 2):
        change(model)
        publisher.publish(model)
        assert update(engine, version) == ["patches"]
        assert_equal(served, model)


def test_patches_have_each_name_of_tied_tensors(tmp_path: Path) -> None:
    """A worker may have them apart."""
    model, served = Served(), Served()
    model.head = model.layer.weight
    served.head = nn.Parameter(torch.zeros(40, 50, dtype=torch.bfloat16))
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    for version in (1, 2):
        change(model)
        publisher.publish(model)
        assert update(engine, version) == (["begin", "end"] if version == 1 else ["patches"])
        assert_equal(served, model)


@pytest.mark.parametrize("how", ["integers", "nan"])
def test_what_no_patch_can_say_is_loaded_whole(tmp_path: Path, how: str) -> None:
    model, served = Served(), Served()
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    publisher.publish(model)
    update(engine, 1)
    change(model)
    if how == "integers":
        model.steps.data += 1
    else:
        model.layer.bias.data[3] = float("nan")
    publisher.publish(model)
    assert update(engine, 2) == ["begin", "end"]
    assert_equal(served, model)


def test_after_a_failed_update_the_whole_model_is_loaded(tmp_path: Path) -> None:
    model, served = Served(), Served()
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    publisher.publish(model)
    served.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        update(engine, 1)
    served.fails = False
    assert update(engine, 1) == ["begin", "end"]  # again, though nothing new is there
    assert_equal(served, model)


@pytest.mark.parametrize("again", [2, 3])
def test_after_patches_that_could_not_be_made_the_whole_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """The device had no memory for them. The copy was at the new version, and the model was taken
    for it."""
    model, served = Served(), Served()
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    for _ in range(3):
        change(model)
        publisher.publish(model)
    update(engine, 1)

    def fail(**_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(import_module(type(engine).__module__), "CheckpointWeightPatch", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            update(engine, 2)
    assert update(engine, again) == ["begin", "end"]
    assert update(engine, 3) == (["patches"] if again == 2 else [])
    assert_equal(served, model)


def test_another_shape_is_loaded_whole(tmp_path: Path) -> None:
    model, served = Served(), Served()
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    publisher.publish(model)
    update(engine, 1)
    model.layer.bias = nn.Parameter(torch.ones(20, dtype=torch.bfloat16))
    served.layer.bias = nn.Parameter(torch.zeros(20, dtype=torch.bfloat16))
    publisher.publish(model)
    assert update(engine, 2) == ["begin", "end"]
    assert_equal(served, model)


def test_a_version_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """The model kept the old values without a word."""
    model, served = Served(), Served()
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    publisher.publish(model)
    update(engine, 1)
    change(model)
    publisher.publish({"layer.weight": model.layer.weight})
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"version 2 lacks 'layer\.bias', 'steps', of which"):
            update(engine, 2)
        assert not vllm_standin.calls
    publisher.publish(model)
    assert update(engine, 3) == ["begin", "end"]
    assert_equal(served, model)


def test_all_workers_reach_the_version_that_is_asked_for(tmp_path: Path) -> None:
    model, served, wanted = Served(), Served(), Served()
    publisher, engine = Publisher(tmp_path), make_engine(tmp_path, served)
    for version in range(1, 4):
        publisher.publish(model)
        if version == 2:
            wanted.load_state_dict(model.state_dict())
        change(model)
    update(engine, 1)
    assert update(engine, 2) == ["patches"]  # though there is a newer one
    assert_equal(served, wanted)
    with pytest.raises(WeightsError, match="there is no version 4; the newest is 3"):
        update(engine, 4)
    assert_equal(served, wanted)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invalid init_info"):
        make_engine(tmp_path, Served()).parse_init_info({"stor": "a"})
