"""What adapters of federated learning share: which arrays are compressed, how, and what is refused.

A server sends models without a residual, because a client may have missed any round before. A
client sends changes of the model, and keeps the codec's error of each as a residual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradwire
from gradwire.container import Tensor

MODELS = "int8:bucket=256,ef=off"
# A scale for each 250 values: with one for each array the first rounds learn much less.
UPDATES = "3lc:s=1.00,bucket=250,coder=rice"


def codec_of_models(codec: str) -> str:
    """The codec, spelled out. Raises GradwireError for an unknown one, ValueError for one with
    error feedback."""
    compressor = gradwire.Compressor(codec, 1)
    if compressor.residual is not None:
        raise ValueError(
            f"codec {codec!r} owes a part of the model to the next round, which a client may "
            "miss: take one without error feedback, as int8:bucket=256,ef=off, bf16, qsgd"
        )
    return compressor.codec


def is_compressed(values: NDArray[Any], min_numel: int) -> bool:
    """Whether the array is compressed at all: float32, and large enough."""
    return values.dtype == np.float32 and values.size >= min_numel


def require_finite(arrays: Mapping[str, NDArray[Any]], client: str) -> None:
    """Raises ValueError, which names the client, the array and the element, for NaN or infinity."""
    for name, values in arrays.items():
        if not np.issubdtype(values.dtype, np.floating):
            continue
        finite = np.isfinite(values).reshape(-1)
        if not finite.all():
            place = int(finite.argmin())
            raise ValueError(
                f"{client}: array {name!r} has {values.reshape(-1)[place]} at element {place}; "
                "only finite values are exchanged. Look for a learning rate that is too large"
            )


def encode_update(
    values: NDArray[Any],
    codec: str,
    residual: NDArray[Any] | None,
    *,
    seed: int,
    step: int,
    stream: int,
) -> tuple[bytes, NDArray[Any] | None]:
    """The frame of an update and the new residual, both with the old residual added.

    Args:
        values: float32.
        residual: That of the client's update before, of as many values; None: there is none.
        seed: Of the client, for codecs that draw.
        step: Counts the client's updates.
        stream: The array's place among all.
    """
    compressor = gradwire.Compressor(codec, values.size, seed=seed, stream=stream)
    if residual is not None:
        state = compressor.state_dict()
        compressor.load_state_dict({**state, "residual": residual.reshape(-1)})
    frame = compressor.encode(values, step)
    return frame, compressor.residual


def decode_frame(frame: bytes | memoryview, shape: tuple[int, ...]) -> NDArray[Any]:
    """The values, in this shape. Raises GradwireError for a corrupt frame, and ValueError for one
    of another number of values."""
    numel = math.prod(shape)
    values = np.asarray(gradwire.decode(frame, max_numel=numel))
    if values.size != numel:
        raise ValueError(f"a frame of shape {shape} has {values.size} values, not {numel}")
    return values.reshape(shape)


def require_codec(tensor: Tensor, codec: str) -> None:
    """Raises ValueError for a frame that another codec has made."""
    made = str(gradwire.inspect(tensor.data)["codec"])
    wanted = str(gradwire.inspect(gradwire.encode(np.zeros(1, np.float32), codec))["codec"])
    if made != wanted:
        raise ValueError(
            f"tensor {tensor.name!r} was compressed with {made}, this end expects {wanted}; both "
            "ends need the same arguments"
        )
