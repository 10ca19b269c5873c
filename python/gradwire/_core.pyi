from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

class _SupportsDlpack(Protocol):
    def __dlpack__(self, *, stream: Any = ..., **kwargs: Any) -> object: ...

# float32 in and out, uint8 where bytes are meant.
_Array = Buffer | _SupportsDlpack
_Tensor = tuple[str, Sequence[int]]
_Rule = tuple[str, ...]

__version__: str

class GradwireError(ValueError):
    code: str

class NonFiniteWarning(RuntimeWarning): ...

def encode(
    x: _Array,
    codec: str,
    *,
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
    threads: int = 1,
    target: str = "auto",
    dtype: str | None = None,
) -> bytes: ...
@overload
def decode(
    frame: _Array,
    *,
    threads: int = 1,
    target: str = "auto",
    max_numel: int = 2147483648,
    dtype: Literal["float32"] = "float32",
) -> npt.NDArray[np.float32]: ...
@overload
def decode(
    frame: _Array,
    *,
    threads: int = 1,
    target: str = "auto",
    max_numel: int = 2147483648,
    dtype: str,
) -> npt.NDArray[Any]: ...
def decode_into(
    frame: _Array,
    out: _Array,
    accumulate: bool = False,
    *,
    threads: int = 1,
    target: str = "auto",
) -> None: ...
def inspect(data: _Array) -> dict[str, Any]: ...
def codecs() -> list[dict[str, Any]]: ...
def scale_growth(codec: str) -> float: ...
def max_encoded_size(codec: str, numel: int) -> int: ...
def simd_targets() -> list[str]: ...
def build_info() -> dict[str, str]: ...

class Compressor:
    def __init__(
        self,
        codec: str,
        numel: int,
        *,
        seed: int = 0,
        stream: int = 0,
        threads: int = 1,
        target: str = "auto",
    ) -> None: ...
    def encode(self, x: _Array, step: int = 0) -> bytes: ...
    def encode_into(self, x: _Array, out: _Array, step: int = 0) -> int: ...
    @property
    def codec(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def max_encoded_size(self) -> int: ...
    @property
    def residual(self) -> npt.NDArray[np.float32] | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

class Layout:
    def __init__(
        self,
        tensors: Sequence[_Tensor],
        world_size: int,
        codec: str,
        *,
        pull_codec: str | None = None,
        rules: Sequence[_Rule] = (),
        exclude: Sequence[str] = (),
        min_numel: int = 256,
        raw_codec: str = "raw",
        servers: int = 0,
    ) -> None: ...
    @property
    def segments(self) -> list[dict[str, Any]]: ...
    def streams(self, rank: int) -> list[int]: ...
    @property
    def unmatched(self) -> list[str]: ...
    @property
    def numel(self) -> int: ...
    @property
    def workers(self) -> int: ...
    def describe(self) -> str: ...

class ShardCodecs: ...

class Exchange:
    def __init__(
        self,
        layout: Layout,
        rank: int,
        kind: str = "sharded",
        *,
        update: Callable[[], object] | None = None,
        machine_of_rank: Sequence[int] | None = None,
        threads: int = 1,
        target: str = "auto",
        seed: int = 0,
        shard_codecs: ShardCodecs | None = None,
    ) -> None: ...
    def describe(self) -> str: ...
    def check_peer(self, peer: int, text: str) -> None: ...
    def start(self, bucket: _Array, step: int) -> None: ...
    def start_on_device(self, address: int, numel: int, step: int) -> None: ...
    def outgoing(self) -> list[tuple[int, npt.NDArray[np.uint8]]]: ...
    def awaiting(self) -> list[int]: ...
    def receive(self, peer: int, message: _Array) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def non_finite(self) -> dict[str, Any] | None: ...
    @property
    def keeps_residuals(self) -> bool: ...
    def retract(self) -> None: ...
    def scale_residuals(self, factor: float) -> None: ...
    def export_residuals(self) -> list[dict[str, Any]]: ...
    def import_residual(
        self, kind: str, name: str, offset: int, values: npt.NDArray[np.float32]
    ) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class ServerSide(Exchange):
    def __init__(
        self,
        layout: Layout,
        rank: int,
        update: Callable[[], object],
        *,
        backup: int = 0,
        staleness: int = 0,
        history: int = 64,
        threads: int = 1,
        target: str = "auto",
        seed: int = 0,
    ) -> None: ...
    @property
    def version(self) -> int: ...
    def set_version(self, version: int) -> None: ...
    @property
    def dropped_pushes(self) -> list[int]: ...
    @property
    def behind(self) -> list[int]: ...
    def caught_up(self, worker: int) -> None: ...

class WorkerSide(Exchange):
    def __init__(
        self,
        layout: Layout,
        rank: int,
        apply: Callable[[int, int], object],
        *,
        backup: int = 0,
        staleness: int = 0,
        history: int = 64,
        threads: int = 1,
        target: str = "auto",
        seed: int = 0,
    ) -> None: ...
    def version(self, server: int) -> int: ...
    def set_version(self, server: int, version: int) -> None: ...
    @property
    def dropped_pushes(self) -> list[int]: ...
    def catch_up(self, server: int, version: int) -> None: ...

def exchanges() -> list[dict[str, Any]]: ...
def parse_exchange(text: str) -> dict[str, Any]: ...
