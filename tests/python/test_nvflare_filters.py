"""gradwire.contrib.nvflare over stand-ins for FLARE's classes: messages, and what is refused.

tests/recipes/test_nvflare.py has FLARE itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import gradwire
from gradwire import container

MODEL: dict[str, Any] = {
    "w": np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32),
    "b": np.ones(5, np.float32),
    "count": np.array([3], np.int64),
}
CODECS = ("int8:bucket=256,ef=off", "3lc:s=1.00,bucket=250,coder=rice")


class DataKind(StrEnum):
    WEIGHTS = "WEIGHTS"
    WEIGHT_DIFF = "WEIGHT_DIFF"
    COLLECTION = "COLLECTION"


class DXO:
    def __init__(self, data_kind: str, data: Any, meta: Any = None) -> None:
        self.data_kind, self.data, self.meta = data_kind, data, meta or {}


class DXOFilter:
    def __init__(self, supported_data_kinds: list[str], data_kinds_to_filter: list[str]) -> None:
        self.props: dict[str, Any] = {}

    def get_prop(self, key: str) -> Any:
        return self.props[key]

    def log_info(self, fl_ctx: Any, text: str) -> None: ...


class Context:
    """A context of FLARE: of a process with a name, and the one at the other end."""

    def __init__(self, name: str, peer: Context | None = None) -> None:
        self.name, self.peer, self.props = name, peer, dict[str, Any]()

    def get_identity_name(self) -> str:
        return self.name

    def get_peer_context(self) -> Context | None:
        return self.peer

    def set_prop(self, key: str, value: Any, *, private: bool, sticky: bool) -> None:
        assert private
        assert sticky, "another message would not know it"
        self.props[key] = value

    def get_prop(self, key: str) -> Any:
        return self.props.get(key)


@pytest.fixture
def nvflare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module gradwire.contrib.nvflare, over the stand-ins."""

    class Constants:
        TASK_DATA_CHAIN, CHAIN_TYPE = "task_data", "chain"

    content: dict[str, dict[str, Any]] = {
        "dxo": {"DXO": DXO, "DataKind": DataKind, "from_shareable": lambda shareable: shareable},
        "dxo_filter": {"DXOFilter": DXOFilter},
        "filter": {"FilterChainType": Constants, "FilterContextKey": Constants},
        "fl_context": {"FLContext": Context},
        "shareable": {"Shareable": object},
    }
    for name in ("nvflare", "nvflare.apis"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, values in content.items():
        module = ModuleType(f"nvflare.apis.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "gradwire.contrib.nvflare", raising=False)
    yield importlib.import_module("gradwire.contrib.nvflare")
    del sys.modules["gradwire.contrib.nvflare"]


class Ends:
    """A server and a client, and what travels between their filters."""

    def __init__(self, nvflare: Any, *arguments: Any, client: tuple[Any, ...] = ()) -> None:
        self.client, self.server = Context("site-1"), Context("server")
        self.client.peer, self.server.peer = Context("server"), Context("site-1")
        kinds = nvflare.CompressFilter, nvflare.DecompressFilter
        self.to = kinds[0](*arguments), kinds[1](*(client or arguments))
        self.back = kinds[0](*(client or arguments)), kinds[1](*arguments)
        for chain, filters in ("task_data", self.to), ("result", self.back):
            for one in filters:
                one.props["chain"] = chain

    def send(self, arrays: Any, kind: str = "WEIGHTS") -> Any:
        """What the client gets of a task's data."""
        packed = self.pack(self.to[0], arrays, kind, self.server)
        return self.to[1].process_dxo(packed, packed, self.client).data

    def answer(self, arrays: Any, kind: str = "WEIGHT_DIFF") -> Any:
        """What the server gets of a result."""
        return self.unpack(self.pack(self.back[0], arrays, kind, self.client))

    def pack(self, own: Any, arrays: Any, kind: str, context: Context) -> DXO:
        dxo = DXO(kind, arrays)
        packed: DXO = own.process_dxo(dxo, dxo, context)
        return packed

    def unpack(self, packed: DXO) -> Any:
        return self.back[1].process_dxo(packed, packed, self.server).data


def change(**arrays: Any) -> dict[str, Any]:
    return {"w": MODEL["w"] * 0.1, "b": MODEL["b"], "count": MODEL["count"]} | arrays


def test_models_arrive_and_changes_but_for_the_residual(nvflare: Any) -> None:
    ends = Ends(nvflare, *CODECS)
    model = ends.send(MODEL)
    np.testing.assert_allclose(model["w"], MODEL["w"], atol=0.03)
    assert model["b"].tolist() == [1.0] * 5
    assert (model["count"].dtype, model["count"].tolist()) == (np.int64, [3])
    model["w"] += 1  # as FLARE's trainers do
    seen = np.zeros_like(MODEL["w"])
    for _ in range(5):
        seen += ends.answer(change())["w"]
    residual = ends.back[0]._residuals["client site-1", "w"].reshape(40, 50)
    np.testing.assert_allclose(seen + residual, 5 * change()["w"], atol=1e-4)
    assert np.abs(residual).max() > 0.01, "the codec lost nothing"


def test_a_message_holds_a_container_and_is_compressed_once(nvflare: Any) -> None:
    ends = Ends(nvflare, *CODECS)
    packed = ends.pack(ends.to[0], MODEL, "WEIGHTS", ends.server)
    content = container.parse(packed.data[nvflare.KEY])
    container.check_frames(content)
    assert [(t.name, t.storage) for t in content.tensors] == [
        ("w", "frame"), ("b", "plain"), ("count", "plain"),
    ]  # fmt: skip
    assert ends.to[0].process_dxo(packed, packed, ends.server) is None, "for the next client"


def test_clients_of_one_filter_keep_their_residuals(nvflare: Any) -> None:
    """Each lost its own when another sent a change."""
    ends = Ends(nvflare, *CODECS)
    other = Context("site-2", Context("server"))
    seen = np.zeros_like(MODEL["w"])
    for _ in range(5):
        ends.send(MODEL)
        ends.pack(ends.back[0], change(), "WEIGHT_DIFF", other)
        seen += ends.answer(change())["w"]
    residual = ends.back[0]._residuals["client site-1", "w"].reshape(40, 50)
    np.testing.assert_allclose(seen + residual, 5 * change()["w"], atol=1e-4)


def test_a_training_by_whole_models(nvflare: Any) -> None:
    ends = Ends(nvflare)
    ends.send(MODEL)
    trained = {name: values + 1 for name, values in MODEL.items()}
    np.testing.assert_allclose(ends.answer(trained, "WEIGHTS")["w"], trained["w"], atol=0.04)
    assert ends.back[0]._residuals == {}


def test_integers_that_flare_averages_as_floats_may_be_integers_again(nvflare: Any) -> None:
    """FLARE's average of PyTorch's num_batches_tracked is a float, and the client's an integer."""
    ends = Ends(nvflare)
    ends.send(MODEL | {"count": np.array([3.5], np.float32)})
    found = ends.answer(MODEL, "WEIGHTS")
    assert (found["count"].dtype, found["count"].tolist()) == (np.int64, [3])


def _cut(nvflare: Any, ends: Ends) -> Any:
    packed = ends.pack(ends.back[0], change(), "WEIGHT_DIFF", ends.client)
    packed.data[nvflare.KEY] = packed.data[nvflare.KEY][:-1]
    return ends.unpack(packed)


def _damaged(nvflare: Any, ends: Ends) -> Any:
    packed = ends.pack(ends.back[0], change(), "WEIGHT_DIFF", ends.client)
    content = container.parse(packed.data[nvflare.KEY])
    frame = bytearray(content.tensors[0].data)
    frame[-1] ^= 1
    damaged = bytes(packed.data[nvflare.KEY]).replace(bytes(content.tensors[0].data), frame)
    return ends.unpack(DXO("WEIGHT_DIFF", {nvflare.KEY: damaged}))


def _not_finite_from_the_network(nvflare: Any, ends: Ends, like: Any = np.asarray) -> Any:
    views = nvflare.views_of(change(b=like(np.full(5, np.inf, np.float32))))
    nvflare.require_finite = lambda *_: None
    packed = ends.back[0]._pack(views, "WEIGHT_DIFF", "client site-1")
    nvflare.require_finite = importlib.import_module("gradwire.contrib.federated").require_finite
    return ends.unpack(DXO("WEIGHT_DIFF", {nvflare.KEY: packed}))


def _of_half_the_width(nvflare: Any, ends: Ends) -> Any:
    half = MODEL["w"].astype(np.float16)
    tensors = [container.Tensor("w", "F32", half.shape, gradwire.encode(half, CODECS[1]), "frame")]
    for name, dtype in ("b", "F32"), ("count", "I64"):
        values = MODEL[name]
        tensors.append(container.Tensor(name, dtype, values.shape, values.tobytes()))
    content = container.TensorFile("safetensors", tuple(tensors))
    packed = b"".join(container.serialize(content))
    return ends.unpack(DXO("WEIGHT_DIFF", {nvflare.KEY: packed}))


BAD: dict[str, tuple[Callable[[Any, Ends], Any], str]] = {
    "a cut frame": (_cut, "the data area has"),
    "a damaged frame": (_damaged, "checksum"),
    "another dtype": (_of_half_the_width, "its dtype is 'F32', the frame holds float16"),
    "not compressed": (
        lambda _, ends: ends.unpack(DXO("WEIGHT_DIFF", change())),
        "it was not compressed; the other end lacks CompressFilter",
    ),
    "other names": (
        lambda _, ends: ends.answer({"w": MODEL["w"], "x": MODEL["b"], "count": MODEL["count"]}),
        r"must have the arrays of the model; they differ in \['b', 'x'\]",
    ),
    "another shape": (lambda _, ends: ends.answer(change(w=MODEL["w"].T)), r"differ in \['w'\]"),
    "nan": (
        lambda _, ends: ends.answer(change(b=np.array([0, 1, np.nan, 0, 0], np.float32))),
        "array 'b' has nan at element 2; only finite values are exchanged",
    ),
    "infinity that was sent": (_not_finite_from_the_network, "array 'b' has inf at element 0"),
    "infinity in a tensor that was sent": (
        lambda nvflare, ends: _not_finite_from_the_network(nvflare, ends, torch.from_numpy),
        "array 'b' has inf at element 0",
    ),
    "no array": (lambda _, ends: ends.answer(change(b="text")), "'b' is of type str"),
    "a collection": (
        lambda _, ends: ends.back[0].process_dxo(
            DXO("WEIGHT_DIFF", change()), DXO("COLLECTION", {}), ends.client
        ),
        "a collection cannot be compressed",
    ),
}


@pytest.mark.parametrize(("send", "said"), BAD.values(), ids=BAD)
def test_what_is_refused_names_the_client(
    nvflare: Any, send: Callable[[Any, Ends], Any], said: str
) -> None:
    ends = Ends(nvflare)
    ends.send(MODEL)
    with pytest.raises(ValueError, match=rf"^client site-1: .*{said}"):
        send(nvflare, ends)
    ends.answer(change())  # and the next one is welcome


def test_a_server_compares_a_result_that_comes_from_the_network(nvflare: Any) -> None:
    """Before memory is taken: a frame of 32 bytes can stand for an array of any size."""
    ends, stranger = Ends(nvflare), Ends(nvflare)
    ends.send(MODEL)
    packed = stranger.pack(stranger.back[0], {"w": MODEL["w"]}, "WEIGHT_DIFF", stranger.client)
    with pytest.raises(ValueError, match=r"client site-1: .*they differ in \['b', 'count'\]"):
        ends.unpack(packed)


def test_another_codec_is_refused_at_both_ends(nvflare: Any) -> None:
    ends = Ends(nvflare, "bf16", "int8", client=("int8:ef=off", "raw"))
    with pytest.raises(ValueError, match=r"site-1: tensor 'w' .* with bf16, this end expects int8"):
        ends.send(MODEL)
    with pytest.raises(ValueError, match=r"site-1: tensor 'w' .* with raw, this end expects int8"):
        ends.answer(change())


def test_a_codec_with_a_residual_is_refused_for_models(nvflare: Any) -> None:
    with pytest.raises(ValueError, match="ef=off"):
        nvflare.CompressFilter("3lc:s=1.00")


def test_swarm_learning_is_refused(nvflare: Any) -> None:
    """No filter was called, and nothing was compressed, without a word."""

    class CCWFJob: ...

    class Recipe:
        _job = CCWFJob()

        def __getattr__(self, name: str) -> Any:
            return lambda one, tasks: None

    with pytest.raises(ValueError, match="FLARE calls no filters"):
        nvflare.compress(Recipe())


def test_a_recipe_gets_the_four_filters(nvflare: Any) -> None:
    added: dict[str, Any] = {}

    class Recipe:
        def __getattr__(self, name: str) -> Any:
            return lambda one, tasks: added.update({name: (type(one).__name__, one.updates, tasks)})

    nvflare.compress(Recipe(), updates="int8")
    out, into = ("CompressFilter", "int8", ["train"]), ("DecompressFilter", "int8", ["train"])
    assert added == {
        "add_server_output_filter": out,
        "add_client_input_filter": into,
        "add_client_output_filter": out,
        "add_server_input_filter": into,
    }
