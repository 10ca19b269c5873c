"""gradwire.contrib.flower takes no memory for what a reply states: stand-ins for Flower's classes.

tests/recipes/test_flower.py has Flower itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradwire
from golden import encoder
from payloads.three_lc import NUMBER as THREE_LC

VALUES = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100)
MODEL: dict[str, Any] = {"w": VALUES, "b": np.ones(5, np.float32), "count": np.array([3], np.int64)}


class Array:
    def __init__(self, values: Any = None, **stated: Any) -> None:
        if values is not None:
            stated = {"dtype": str(values.dtype), "shape": values.shape, "stype": "numpy.ndarray"}
            stated |= {"data": values.tobytes()}
        self.dtype, self.shape = stated["dtype"], stated["shape"]
        self.stype, self.data = stated["stype"], stated["data"]

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Content(dict[str, Any]):
    """The content of a message or a context."""

    @property
    def array_records(self) -> dict[str, Any]:
        return {name: record for name, record in self.items() if isinstance(record, Record)}

    config_records = property(lambda self: {})


class Record(dict[str, Any]):
    pass


class Message:
    def __init__(self, arrays: Record, node: int = 1) -> None:
        self.content = Content(arrays=arrays)
        self.metadata = SimpleNamespace(dst_node_id=node, src_node_id=node)

    def has_content(self) -> bool:
        return True


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module gradwire.contrib.flower, over the stand-ins."""
    app, serverapp = ModuleType("flwr.app"), ModuleType("flwr.serverapp")
    for name, value in {"Array": Array, "ArrayRecord": Record, "ConfigRecord": dict}.items():
        setattr(app, name, value)
    for name in ("Context", "Message"):
        setattr(app, name, object)
    app.RecordDict, serverapp.Grid = Content, object  # type: ignore[attr-defined]
    for module in (ModuleType("flwr"), app, serverapp):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "gradwire.contrib.flower", raising=False)
    yield importlib.import_module("gradwire.contrib.flower")
    del sys.modules["gradwire.contrib.flower"]


def plain(arrays: dict[str, Any]) -> Record:
    return Record({name: Array(values) for name, values in arrays.items()})


def zeros_frame(numel: int) -> bytes:
    """A valid frame of 32 bytes that stands for so many zeros."""
    return bytes(encoder.seal_frame(THREE_LC, 0, 0, numel, b""))


def frame_of(numel: int, **stated: Any) -> Array:
    return Array(
        **{"dtype": "float32", "shape": (numel,), "stype": "gradwire", "data": zeros_frame(numel)}
        | stated
    )


class Clients:
    """The grid under a CompressedGrid: every client replies with `reply`."""

    def __init__(self, reply: Record) -> None:
        self.reply = reply

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return [Message(self.reply, message.metadata.dst_node_id) for message in messages]


def ask_server(flower: Any, reply: Record) -> dict[str, Any]:
    """What a strategy gets of a reply that came over the network."""
    grid = flower.CompressedGrid(Clients(reply))
    (answer,) = grid.send_and_receive([Message(plain(MODEL))])
    return {name: array.numpy() for name, array in answer.content["arrays"].items()}


def ask_mod(flower: Any, reply: Record) -> Any:
    """What the mod sends if the client's own functions give this reply."""
    context = SimpleNamespace(state=Content(), node_id=7)
    mod = flower.CompressionMod("raw")
    return mod(Message(plain(MODEL)), context, lambda message, _: Message(reply)).content["arrays"]


OTHERS: dict[str, tuple[Any, str]] = {
    "more values": (frame_of(1 << 30), "w"),
    "another shape": (frame_of(1000), "w"),
    "another dtype": (frame_of(1000, shape=(10, 100), dtype="float64"), "w"),
    "no dtype": (frame_of(1000, shape=(10, 100), dtype="junk"), "w"),
    "an array beside": (frame_of(1 << 30), "more"),
    "a frame of integers": (frame_of(1, dtype="int64"), "count"),
}


@pytest.mark.parametrize("ask", [ask_server, ask_mod])
@pytest.mark.parametrize(("array", "name"), OTHERS.values(), ids=OTHERS)
def test_other_arrays_than_the_models_take_no_memory(
    flower: Any,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[..., Any],
    array: Array,
    name: str,
) -> None:
    assert len(array.data) == 32
    monkeypatch.setattr(gradwire, "decode", lambda *_, **__: pytest.fail("a frame was decoded"))
    with pytest.raises(ValueError, match=rf"arrays of the model; they differ in \['{name}'\]"):
        ask(flower, Record(plain(MODEL) | {name: array}))


@pytest.mark.parametrize("ask", [ask_server, ask_mod])
def test_an_array_that_is_missing_is_named(flower: Any, ask: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"they differ in \['b'\]"):
        ask(flower, plain({name: values for name, values in MODEL.items() if name != "b"}))


def test_a_frame_must_have_the_values_that_its_shape_states(flower: Any) -> None:
    for numel, error in ((999, "has 999 values, not 1000"), (1 << 30, "1073741824 values")):
        array = frame_of(1000, shape=(10, 100), data=zeros_frame(numel))
        with pytest.raises(ValueError, match=error):
            ask_server(flower, Record(plain(MODEL) | {"w": array}))


def test_what_is_not_compressed_travels_as_it_is(flower: Any) -> None:
    """Differences to a model of other magnitudes would lose its lowest bits."""
    trained = {"w": VALUES, "b": np.full(5, 0.3, np.float32), "count": np.array([4], np.int64)}
    sent = ask_mod(flower, plain(trained))
    np.testing.assert_array_equal(sent["b"].numpy(), trained["b"])
    received = ask_server(flower, Record(plain(trained) | {"w": sent["w"]}))
    for name, values in trained.items():
        np.testing.assert_array_equal(received[name], values)


def test_the_arrays_of_the_model_pass(flower: Any) -> None:
    zeros = frame_of(1000, shape=(10, 100))
    trained = ask_server(flower, Record(plain(MODEL) | {"w": zeros}))
    np.testing.assert_array_equal(trained["w"], VALUES)
    np.testing.assert_array_equal(trained["b"], MODEL["b"])
    sent = ask_mod(flower, plain({**MODEL, "w": VALUES + 1}))
    np.testing.assert_allclose(gradwire.decode(sent["w"].data), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("ask", "client"), [(ask_server, "client 1"), (ask_mod, "client 7")], ids=["server", "mod"]
)
@pytest.mark.parametrize(
    ("array", "said"),
    [
        (Array(np.array([0, 1, np.nan, 3, 4], np.float32)), "'b' has nan at element 2"),
        (frame_of(5, data=zeros_frame(5)[:-1]), "frame: 31 bytes are less than a header of 32"),
    ],
    ids=["nan", "cut"],
)
def test_values_that_are_refused_name_the_client(
    flower: Any, ask: Callable[..., Any], client: str, array: Array, said: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{client}: .*({said})"):
        ask(flower, Record(plain(MODEL) | {"b": array}))


def test_arrays_that_answer_a_message_without_a_model_pass(flower: Any) -> None:
    """As a client's first parameters do, for which the server asks by a message without arrays."""
    question = Message(Record())
    question.content.clear()
    (answer,) = flower.CompressedGrid(Clients(plain(MODEL))).send_and_receive([question])
    for name, values in MODEL.items():
        np.testing.assert_array_equal(answer.content["arrays"][name].numpy(), values)
