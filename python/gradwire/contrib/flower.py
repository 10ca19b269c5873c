"""Compressed messages for Flower (flwr): models to the clients, updates from them.

    from gradwire.contrib.flower import CompressedGrid, CompressionMod

    app = ClientApp(mods=[CompressionMod()])  # each client
    strategy.start(CompressedGrid(grid, "int8:bucket=256,ef=off"), arrays)  # the server

Strategies, and the functions of the ClientApp, see whole models in both directions.

A round: the server encodes the model x, without a residual, because a client may have missed any
round before. The client decodes it to y, trains it to z, adds its residual to the update z - y,
and sends that. It keeps the codec's error as its residual in `context.state`, which stays on the
client. The server decodes the update u and gives x + u to the strategy: the model itself never
takes the error of its encoding.

Both ends are needed. float32 arrays of at least `min_numel` values are compressed; all others,
and the metrics, travel as they are. What was float32 in an earlier round is sent as float32 though
a strategy computes it in float64, as FedAdam does. A frame is the data of an `Array` whose stype
begins with "gradwire".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradwire
from gradwire.contrib.federated import (
    MODELS,
    UPDATES,
    codec_of_models,
    decode_frame,
    encode_update,
    is_compressed,
    require_finite,
)
from gradwire.errors import requiring
from gradwire.option_record import explains_arguments

with requiring(__name__, "Flower", "flwr", "'.[flower]'"):
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.serverapp import Grid

# Flower's error at an end that has no part of this module names the stype.
STYPE = "gradwire: this end lacks gradwire.contrib.flower's CompressionMod or CompressedGrid"
RESIDUALS = "gradwire.residuals"
STEPS = "gradwire.steps"  # of this client, from which codecs that draw take their numbers
Arrays = dict[str, np.ndarray[Any, Any]]


class CompressionMod:
    """A mod of a ClientApp: decodes the models that come, and encodes the updates that leave.

    codec      the codec of updates, as text; its residual is kept in `context.state`
    min_numel  arrays with fewer values go raw

    Raises GradwireError for an unknown codec, and in a call for a corrupt model; ValueError in a
    call for a message or reply with more than one ArrayRecord, or a reply whose arrays have other
    names or shapes than the model or values that are not finite.

    A client has no model of its own before the first message, so it takes memory for the shapes
    that the server states. A server takes none for shapes that are not those of its model.
    """

    @explains_arguments
    def __init__(self, codec: str = UPDATES, *, min_numel: int = 256) -> None:
        self.codec = gradwire.Compressor(codec, 1).codec
        self.min_numel = min_numel

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        name = _name_of_arrays(message)
        if name is None:
            return call_next(message, context)
        model = _decode(message.content[name])
        message.content = _with_arrays(message, name, _plain(model))
        reply = call_next(message, context)
        name = _name_of_arrays(reply)
        if name is not None:
            trained = _decode_like(model, reply.content[name], f"client {context.node_id}")
            require_finite(trained, f"client {context.node_id}")
            reply.content = _with_arrays(reply, name, self._encode(model, trained, context))
        return reply

    def _encode(self, model: Arrays, trained: Arrays, context: Context) -> ArrayRecord:
        kept = context.state.array_records.get(RESIDUALS, {})
        step = context.state.config_records.get(STEPS, {"step": 0})["step"]
        record, residuals = ArrayRecord(), ArrayRecord()
        for stream, (name, values) in enumerate(trained.items()):
            if not all(is_compressed(each, self.min_numel) for each in (values, model[name])):
                record[name] = Array(values)
                continue
            seed = context.node_id % 2**64  # clients draw different numbers
            own = kept[name].numpy() if name in kept else None
            frame, residual = encode_update(
                values - model[name], self.codec, own, seed=seed, step=step, stream=stream
            )
            record[name] = _frame(frame, values.shape)
            if residual is not None:
                residuals[name] = Array(residual)
        context.state[RESIDUALS] = residuals
        context.state[STEPS] = ConfigRecord({"step": step + 1})
        return record


@dataclass
class Traffic:
    """Bytes of arrays in messages one way, as sent and without compression. Without names, shapes
    and metrics, which Flower adds in both cases."""

    sent: int = 0
    raw: int = 0

    def count(self, record: ArrayRecord) -> None:
        for array in record.values():
            self.sent += len(array.data)
            self.raw += math.prod(array.shape) * np.dtype(array.dtype).itemsize

    @property
    def ratio(self) -> float:
        return self.raw / max(self.sent, 1)


class CompressedGrid(Grid):
    """A Grid that encodes the models that a strategy sends, and decodes the clients' updates.

    The clients of `grid` must have a `CompressionMod`.

    codec      the codec of models, as text. It must send every value, without error feedback:
               "int8:bucket=256,ef=off", "bf16" or "qsgd:bits=8"
    min_numel  arrays with fewer values go raw

    `to_clients` and `from_clients` count bytes. Raises GradwireError for an unknown codec,
    ValueError for a codec with error feedback, and, with the client's number, for an update that
    does not fit the model, is corrupt or not finite.
    """

    @explains_arguments
    def __init__(self, grid: Grid, codec: str = MODELS, *, min_numel: int = 256) -> None:
        self._grid = grid
        self._codec = codec_of_models(codec)
        self._min_numel = min_numel
        self._rounds = 0
        self._float32: set[str] = set()  # names of arrays that have been float32
        self.to_clients = Traffic()
        self.from_clients = Traffic()

    @property
    def run(self) -> Any:
        return self._grid.run

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self._grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("CompressedGrid has send_and_receive, which strategies call")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("CompressedGrid has send_and_receive, which strategies call")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        models: dict[int, Arrays] = {}  # node -> what it was sent, exactly
        sent: dict[int, tuple[Arrays, ArrayRecord]] = {}  # a strategy sends one model to many nodes
        for message in messages:
            name = _name_of_arrays(message)
            if name is None:
                continue
            record = message.content[name]
            node = message.metadata.dst_node_id
            if node in models:
                raise ValueError(f"two models for node {node} at once; a reply would fit either")
            if id(record) not in sent:
                given = self._in_float32(_decode(record))
                sent[id(record)] = given, self._encode(given)
            models[node], encoded = sent[id(record)]
            message.content = _with_arrays(message, name, encoded)
            self.to_clients.count(message.content[name])
        self._rounds += 1
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        for reply in replies:
            name, model = _name_of_arrays(reply), models.get(reply.metadata.src_node_id)
            if name is not None and model is not None:
                client = f"client {reply.metadata.src_node_id}"
                record = reply.content[name]
                update = _decode_like(model, record, client)
                require_finite(update, client)
                self.from_clients.count(record)
                trained = {
                    key: values + model[key] if _is_frame(record[key]) else values
                    for key, values in update.items()
                }
                reply.content = _with_arrays(reply, name, _plain(trained))
        return replies

    def _in_float32(self, model: Arrays) -> Arrays:
        """The model, with float32 arrays again where a strategy has made them float64."""
        self._float32 |= {name for name, values in model.items() if values.dtype == np.float32}
        wide = {n for n, values in model.items() if values.dtype == np.float64} & self._float32
        return {n: v.astype(np.float32) if n in wide else v for n, v in model.items()}

    def _encode(self, model: Arrays) -> ArrayRecord:
        record = ArrayRecord()
        for stream, (name, values) in enumerate(model.items()):
            if is_compressed(values, self._min_numel):
                frame = gradwire.encode(values, self._codec, step=self._rounds, stream=stream)
                record[name] = _frame(frame, values.shape)
            else:
                record[name] = Array(values)
        return record


def _name_of_arrays(message: Message) -> str | None:
    """Name of the message's ArrayRecord; None if it has none."""
    if not message.has_content():
        return None
    names = list(message.content.array_records)
    if len(names) > 1:
        raise ValueError(f"gradwire.contrib.flower takes one ArrayRecord a message, not {names}")
    return names[0] if names else None


def _with_arrays(message: Message, name: str, arrays: ArrayRecord) -> RecordDict:
    # A new dictionary: a strategy may share the records of its messages.
    return RecordDict({**message.content, name: arrays})


def _frame(frame: bytes, shape: tuple[int, ...]) -> Array:
    return Array(dtype="float32", shape=shape, stype=STYPE, data=frame)


def _is_frame(array: Array) -> bool:
    return array.stype.partition(":")[0] == "gradwire"


def _plain(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(values) for name, values in arrays.items()})


def _decode(record: ArrayRecord) -> Arrays:
    return {name: _decode_array(array) for name, array in record.items()}


def _decode_array(array: Array) -> np.ndarray[Any, Any]:
    if not array.dtype:
        raise ValueError(
            "Flower's older interface (server_fn, NumPyClient) does not say which shapes arrays "
            "have, and gradwire.contrib.flower compares them: write functions for @app.main() and "
            "@app.train()"
        )
    if not _is_frame(array):
        return np.ascontiguousarray(array.numpy()).reshape(array.shape)
    return decode_frame(array.data, tuple(array.shape))


def _decode_like(model: Arrays, record: ArrayRecord, client: str) -> Arrays:
    """The arrays of a reply, which must be those of the model. What the sender states is compared
    before anything is decoded: a frame of 32 bytes can stand for an array of any size."""
    differing = [name for name, array in record.items() if not _is_like(model.get(name), array)]
    differing += model.keys() - record.keys()
    if differing:
        raise ValueError(
            f"{client}: the reply must have the arrays of the model; they differ in "
            f"{sorted(differing)}"
        )
    try:
        return _decode(record)
    except gradwire.GradwireError as error:
        raise ValueError(f"{client}: {error}") from None


def _is_like(values: np.ndarray[Any, Any] | None, array: Array) -> bool:
    """Whether the array states the shape of `values`, and is float32 like these if it is a frame.
    Others may change their dtype: a strategy averages the integers of a model as floats."""
    if values is None or tuple(array.shape) != values.shape:
        return False
    try:
        dtype = np.dtype(array.dtype)
    except TypeError:
        return False
    return not _is_frame(array) or dtype == values.dtype == np.float32
