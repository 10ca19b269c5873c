"""Compressed messages of NVIDIA FLARE: filters for both ends of a task.

    from gradwire.contrib.nvflare import compress

    compress(recipe)  # such as FedAvgRecipe

From the server go models (`WEIGHTS`), without a residual. From a client goes what its training
returns: changes of the model (`WEIGHT_DIFF`), which may be sent coarsely because the filter keeps
the codec's error as a residual and adds it to the next change, or a model. So let the clients send
changes: `params_transfer_type=TransferType.DIFF` of FLARE's executors and recipes.

float32 arrays and tensors of at least `min_numel` values are compressed; all others travel as they
are. A message has a container (spec/format.md) in place of the arrays.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradwire
from gradwire import container
from gradwire.container import Tensor, TensorFile
from gradwire.contrib.federated import (
    MODELS,
    UPDATES,
    codec_of_models,
    decode_frame,
    encode_update,
    is_compressed,
    require_codec,
    require_finite,
)
from gradwire.errors import requiring
from gradwire.option_record import explains_arguments
from gradwire.tensor_dtypes import bytes_of
from gradwire.weights.tensors import View, is_torch, typed_values, views_of

with requiring(__name__, "NVIDIA FLARE", "nvflare", "'.[recipes]'"):
    from nvflare.apis.dxo import DXO, DataKind, from_shareable
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.filter import FilterChainType, FilterContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable

# FLARE's error at an end without the filter names this key of the message.
KEY = "gradwire: this end lacks gradwire.contrib.nvflare's DecompressFilter"
_LAYOUT = "gradwire.layout"  # of the model of the task: names and shapes

Layout = dict[str, tuple[int, ...]]


class _Filter(DXOFilter):
    _compresses: bool

    @explains_arguments
    def __init__(self, weights: str = MODELS, updates: str = UPDATES, min_numel: int = 256) -> None:
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        # FLARE writes a job's arguments from the attributes of their names.
        self.weights, self.updates, self.min_numel = weights, updates, min_numel
        codecs = codec_of_models(weights), gradwire.Compressor(updates, 1).codec
        self._codecs = dict(zip(("WEIGHTS", "WEIGHT_DIFF"), codecs, strict=True))

    def _is_of_task(self) -> bool:
        """Whether the message is a task's data, rather than its result."""
        return bool(self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN)

    def _client(self, fl_ctx: FLContext) -> str:
        """The client at the other end, or this one."""
        is_server = self._is_of_task() == self._compresses
        context = fl_ctx.get_peer_context() if is_server else fl_ctx
        return f"client {context.get_identity_name() if context else 'of unknown name'}"

    def _compare(self, layout: Layout, fl_ctx: FLContext) -> None:
        """Keeps the layout of a task's model. Raises ValueError for a result of another layout.
        Dtypes may change: FLARE averages the integers of a model as floats."""
        if self._is_of_task():
            fl_ctx.set_prop(_LAYOUT, layout, private=True, sticky=True)
            return
        model = fl_ctx.get_prop(_LAYOUT)
        if model is None:
            return
        differing = sorted(n for n in model.keys() | layout.keys() if model.get(n) != layout.get(n))
        if differing:
            raise ValueError(
                f"the result must have the arrays of the model; they differ in {differing}"
            )


class CompressFilter(_Filter):
    """Compresses what leaves: a task's data at the server, its result at a client.

    Args:
        weights: The codec of models. It must send every value, without error feedback:
            "int8:bucket=256,ef=off", "bf16" or "qsgd:bits=8".
        updates: The codec of changes. Its residual stays in the client's filter, and is lost when
            the client's process ends.
        min_numel: Arrays with fewer values are not compressed.

    Raises GradwireError for an unknown codec, and ValueError for one of models with error
    feedback. In a task it raises ValueError, which names the client, for values that are not
    finite or no arrays, and for a result whose arrays have other names or shapes than the model;
    FLARE makes that the task's error.
    """

    _compresses = True

    def __init__(self, weights: str = MODELS, updates: str = UPDATES, min_numel: int = 256) -> None:
        super().__init__(weights, updates, min_numel)
        self._residuals: dict[tuple[str, str], NDArray[Any]] = {}  # by client and array
        self._steps: dict[str, int] = {}  # of each client

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        if KEY in dxo.data:
            return None  # a task for many clients, compressed for the first of them
        client = self._client(fl_ctx)
        try:
            if from_shareable(shareable).data_kind == DataKind.COLLECTION:
                raise ValueError("a collection cannot be compressed; send WEIGHTS or WEIGHT_DIFF")
            views = views_of(dxo.data)
            self._compare({name: view.shape for name, view in views.items()}, fl_ctx)
            packed = self._pack(views, dxo.data_kind, client)
            raw = sum(
                bytes_of("safetensors", v.dtype, math.prod(v.shape)) or 0 for v in views.values()
            )
            self.log_info(fl_ctx, f"{len(packed)} bytes, {raw / len(packed):.2f} x less than raw")
        except (ValueError, gradwire.GradwireError) as error:
            raise _named(client, error) from None
        return DXO(dxo.data_kind, {KEY: packed}, dict(dxo.meta or {}))

    def _pack(self, views: dict[str, View], kind: str, client: str) -> bytes:
        arrays = {name: _array_of(view) for name, view in views.items()}
        require_finite(arrays, client)
        step = self._steps.get(client, 0)
        kept: dict[tuple[str, str], NDArray[Any]] = {}
        tensors = []
        for stream, (name, values) in enumerate(arrays.items()):
            dtype, shape = views[name].dtype, views[name].shape
            if not is_compressed(values, self.min_numel):
                tensors.append(Tensor(name, dtype, shape, values.tobytes()))
                continue
            codec, place = self._codecs[str(DataKind(kind).value)], (client, name)
            frame, residual = encode_update(
                values,
                codec,
                self._residuals.get(place),
                seed=zlib.crc32(client.encode()),  # clients draw different numbers
                step=step,
                stream=stream,
            )
            tensors.append(Tensor(name, dtype, shape, frame, "frame"))
            if residual is not None:
                kept[place] = residual
        metadata = {"torch": "1"} if any(is_torch(view.values) for view in views.values()) else {}
        packed = b"".join(container.serialize(TensorFile("safetensors", tuple(tensors), metadata)))
        self._residuals |= kept  # those of other clients stay
        self._steps[client] = step + 1
        return packed


class DecompressFilter(_Filter):
    """Decompresses what comes: a task's data at a client, its result at the server.

    Takes the arguments of the CompressFilter at the other end. In a task it raises ValueError,
    which names the client, for a message that no CompressFilter has made, that is damaged, was
    compressed with another codec, is not finite, or is a result whose arrays have other names or
    shapes than the model. What a result states is compared before memory is taken.
    """

    _compresses = False

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        client = self._client(fl_ctx)
        try:
            packed = dxo.data.get(KEY)
            if not isinstance(packed, bytes | bytearray | memoryview):
                raise ValueError("it was not compressed; the other end lacks CompressFilter")
            arrays = self._unpack(packed, dxo.data_kind, client, fl_ctx)
        except (ValueError, gradwire.GradwireError) as error:
            raise _named(client, error) from None
        return DXO(dxo.data_kind, arrays, dict(dxo.meta or {}))

    def _unpack(
        self, packed: bytes | bytearray | memoryview, kind: str, client: str, fl_ctx: FLContext
    ) -> dict[str, Any]:
        content = container.parse(bytes(packed))
        self._compare({tensor.name: tensor.shape for tensor in content.tensors}, fl_ctx)
        arrays: dict[str, Any] = {}
        for tensor in content.tensors:
            if tensor.storage == "frame":
                tensor.check_frame()
                require_codec(tensor, self._codecs[str(DataKind(kind).value)])
                values = decode_frame(tensor.data, tensor.shape)
                data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            else:
                data = np.frombuffer(bytearray(tensor.data), np.uint8)
            require_finite({tensor.name: typed_values(tensor.dtype, data, False)}, client)
            typed = typed_values(tensor.dtype, data, "torch" in content.metadata)
            arrays[tensor.name] = typed.reshape(tensor.shape)
        return arrays


@explains_arguments
def compress(
    recipe: Any,
    *,
    weights: str = MODELS,
    updates: str = UPDATES,
    min_numel: int = 256,
    tasks: Sequence[str] = ("train",),
) -> None:
    """Adds the filters of server and clients to a recipe. Without recipes, add the two filters to
    the chains of a FedJob or of its files.

    Args:
        recipe: A recipe of FLARE, such as FedAvgRecipe.
        tasks: The tasks whose data and results are compressed.

    The other arguments, and what is raised, are those of CompressFilter. Raises ValueError for a
    recipe of swarm learning, too.
    """
    job = getattr(recipe, "_job", None)
    if any(base.__name__ == "CCWFJob" for base in type(job).__mro__):
        raise ValueError(
            f"{type(recipe).__name__}: its clients send to each other, where FLARE calls no filters"
        )
    for add, kind in (
        (recipe.add_server_output_filter, CompressFilter),
        (recipe.add_client_input_filter, DecompressFilter),
        (recipe.add_client_output_filter, CompressFilter),
        (recipe.add_server_input_filter, DecompressFilter),
    ):
        add(kind(weights, updates, min_numel), tasks=list(tasks))


def _array_of(view: View) -> NDArray[Any]:
    """The values; bfloat16 as 16-bit integers."""
    return np.asarray(typed_values(view.dtype, view.read(), use_torch=False)).reshape(view.shape)


def _named(client: str, error: Exception) -> ValueError:
    said = str(error)
    return ValueError(said if said.startswith(client) else f"{client}: {said}")
