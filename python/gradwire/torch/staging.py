"""Where the engine finds the values of a bucket, whatever device they are on.

The engine works on host memory. Values on the CPU are there already (`Stage`). Those on any other
device are copied to page-locked memory and back on a stream of their own, so that the copy of one
bucket, the exchange of another and the backward pass overlap (`CopyStage`). On a CUDA device, a
build with gradwire's kernels encodes and decodes there instead (`KernelStage`). The bytes that are
sent, and the results, are the same.

What is copied once, such as a model that is sent to other ranks, goes through `moved`.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gradwire._core import ShardCodecs, checksum32
from gradwire.torch.network.transport import NOTHING, Bytes
from gradwire.torch.parameters import ordinary_tensors, writing_to

# The module with the kernels for each kind of device.
KERNEL_MODULES = {"cuda": "gradwire._cuda"}
_BUILD = "in its source tree, pip install . -C cmake.define.GRADWIRE_CUDA=ON"
_HIGH_PRIORITY = -1  # the work of a bucket is short, and other ranks wait for it
_MOST_GATHERED = 1 << 25  # bytes of small tensors that one copy takes: twice that is more memory


def kernels_for(device: torch.device) -> ModuleType | None:
    """The module whose kernels run on this device; None if this build has none."""
    try:
        return importlib.import_module(KERNEL_MODULES[device.type])
    except (KeyError, ModuleNotFoundError):
        return None


def stage_for(
    device: torch.device, offload_residuals: bool = False, takes_kernels: bool = True
) -> Stage:
    """The stage of values on `device`.

    Args:
        offload_residuals: Kernels keep residuals in page-locked memory of the host.
        takes_kernels: Whether the exchange can be done by kernels.
    """
    kernels = kernels_for(device) if takes_kernels else None
    if kernels is not None:
        return KernelStage(device, kernels, offload_residuals)
    return Stage() if device.type == "cpu" else CopyStage(device)


class Stage:
    """Values on the CPU, where they stay.

    Attributes:
        shard_codecs: The kernels, if the values are encoded and decoded where they are.
        devices: Whose work torch.futures.Future must wait for; None: there is none.
    """

    shard_codecs: ShardCodecs | None = None
    devices: list[int | str | torch.device] | None = None

    def mark(self, values: torch.Tensor) -> Any:
        """For `after`: the work that is queued for the values, in the thread that queued it."""
        return None

    def after(self, mark: Any) -> contextlib.AbstractContextManager[None]:
        """Work that is queued inside runs after `mark`, and after the work queued here before."""
        return contextlib.nullcontext()

    def follow(self, mark: Any = None) -> None:
        """What this thread queues from now on runs after `mark` (None: after all copies that are
        queued), for which the host does not wait."""

    def fetch(self, values: torch.Tensor) -> Any:
        """Begins to copy the values to the host; for `on_host`. In the thread that has them."""
        return None

    @contextlib.contextmanager
    def on_host(self, values: torch.Tensor, fetched: Any = None) -> Iterator[torch.Tensor]:
        """Inside, the values are where the engine works on them, and may be changed there.

        fetched: what `fetch` returned for them, if it was called.
        """
        yield values

    def beside(self, values: torch.Tensor) -> torch.Tensor:
        """Memory of the host for values that come and go again and again: `bring` and `put`. On
        the CPU it is the values themselves."""
        return values

    def bring(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Copies the values to their place on the host, and waits."""

    def put(self, host: torch.Tensor, values: torch.Tensor) -> None:
        """Copies the values from their place on the host, and waits."""

    def settle(self) -> None:
        """Waits until changed values are back on the device."""

    def remarks(self) -> tuple[str, ...]:
        """What a user should know."""
        return ()


class _Streaming(Stage):
    """Work on a stream of its own, beside the program's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The CPU, mps and some others have no further stream: there, all work is done in turn.
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._streams = module if hasattr(module, "stream") else None
        self._stream: Any = None
        if self._streams is not None:
            self._stream = self._streams.Stream(device, priority=_HIGH_PRIORITY)
            self.devices = [device]

    def mark(self, values: torch.Tensor) -> Any:
        if self._streams is None:
            return None
        return self._streams.current_stream(self.device).record_event()

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        if self._streams is None:
            yield
            return
        # The device is entered first. Leaving a stream makes the thread's earlier device current:
        # in a new thread that is device 0, and this would create a context there.
        with self._streams.device(self.device), self._streams.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield

    def follow(self, mark: Any = None) -> None:
        if self._streams is not None:
            mark = self._stream.record_event() if mark is None else mark
            self._streams.current_stream(self.device).wait_event(mark)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class KernelStage(_Streaming):
    """Values that kernels encode and decode where they are."""

    def __init__(
        self, device: torch.device, kernels: ModuleType, offload_residuals: bool = False
    ) -> None:
        super().__init__(device)
        with self.after(None):
            self.shard_codecs = kernels.shard_codecs(
                device.index or 0, getattr(self._stream, "cuda_stream", 0), offload_residuals
            )

    @contextlib.contextmanager
    def on_host(self, values: torch.Tensor, fetched: Any = None) -> Iterator[torch.Tensor]:
        yield values
        self.mark(values)  # an error of the device's work is raised here


class Copier:
    """Copies between a device and the host, in the order of the calls, on the current stream.

    has_streams: The copies are queued there. Without, they have ended when a call returns: nothing
    else could tell when. (mps queues copies, too, if it may.)
    """

    def __init__(self, has_streams: bool) -> None:
        self._has_streams = has_streams

    def to_host(self, values: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(values, non_blocking=self._has_streams)

    def to_device(self, host: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(host, non_blocking=self._has_streams)


class CopyStage(_Streaming):
    """Values that are copied to the host and back, in their own dtype."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copier = Copier(self._streams is not None)
        self._is_page_locked = True
        # Host memory that is free, by dtype and length. It may be taken before the copy out of it
        # has ended: the stream keeps the order.
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self._bytes, self._buckets, self._seconds = 0, 0, 0.0

    @ordinary_tensors()
    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Any] | Exception:
        try:
            with self._copying(), self.after(self.mark(values)):
                host = self._take_memory(values)
                self._copier.to_host(values.view(-1), host)
                return host, self.mark(values)
        except RuntimeError as error:
            return error  # for `on_host`, where the session tells the other ranks

    @contextlib.contextmanager
    def on_host(self, values: torch.Tensor, fetched: Any = None) -> Iterator[torch.Tensor]:
        fetched = fetched or self.fetch(values)
        if isinstance(fetched, Exception):
            raise fetched
        host, copied = fetched
        with self._copying():
            if copied is not None:
                copied.synchronize()  # the only wait for the device
        try:
            yield host.view(values.shape)
            with self._copying(2 * values.nbytes), self.after(None):
                self._copier.to_device(host, values.view(-1))
            self._buckets += 1
        finally:
            self._free[host.dtype, host.numel()].append(host)

    @ordinary_tensors()
    def beside(self, values: torch.Tensor) -> torch.Tensor:
        return self._take_memory(values).zero_()

    def bring(self, values: torch.Tensor, host: torch.Tensor) -> None:
        with self._copying(values.nbytes), self.after(self.mark(values)):
            self._copier.to_host(values, host)
            super().settle()
        self._buckets += 1

    def put(self, host: torch.Tensor, values: torch.Tensor) -> None:
        with self._copying(values.nbytes), self.after(self.mark(values)):
            self._copier.to_device(host, values)
            super().settle()

    def settle(self) -> None:
        with self._copying():
            super().settle()

    @contextlib.contextmanager
    def _copying(self, copied: int = 0) -> Iterator[None]:
        """Counts the time inside, in which so many bytes are copied.

        Raises RuntimeError, which names the device, for any error of it.
        """
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            raise RuntimeError(
                f"values could not be copied between {self.device} and the host ({error}): if the "
                "device is gone, start this rank again, and go on from the last checkpoint"
            ) from error
        self._seconds += time.perf_counter() - started
        self._bytes += copied

    def _take_memory(self, values: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(IndexError):
            return self._free[values.dtype, values.numel()].pop()
        if self._is_page_locked:
            with contextlib.suppress(RuntimeError):  # of a device that can't read such memory
                return torch.empty(
                    values.numel(), dtype=values.dtype, device="cpu", pin_memory=True
                )
        self._is_page_locked = False
        return torch.empty(values.numel(), dtype=values.dtype, device="cpu")

    def remarks(self) -> tuple[str, ...]:
        said = (
            f"values on {self.device} are copied to the host and encoded there: "
            f"{self._bytes:,} bytes in {self._buckets:,} buckets, {self._seconds:.3g} s of waiting"
        )
        if self._streams is None:
            said += ", as this device has no further stream"
        if not self._is_page_locked:
            said += ", without page-locked memory, which PyTorch does not have for it"
        if self.device.type in KERNEL_MODULES:
            said += f". A build with its kernels encodes on the device: {_BUILD}"
        return (said,)


def is_capturing(values: torch.Tensor) -> bool:
    """Whether the current stream's work becomes a CUDA graph."""
    return values.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def moved(
    tensors: Iterable[torch.Tensor], devices: Iterable[torch.device] | None = None
) -> Iterator[torch.Tensor]:
    """The values of each tensor on a device of its own, row-major, one after the other.

    Tensors that follow each other are gathered and copied together, so the number of copies depends
    on the bytes, and hardly on the number of tensors. Each copy is waited for.

    Args:
        devices: For each tensor. None: the host.

    Returns:
        Tensors of the same dtypes and shapes; where a tensor is on that device already, itself.
    """
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    targets = len(plain) * [torch.device("cpu")] if devices is None else list(devices)
    gathered: list[torch.Tensor] = []
    way, size = None, 0
    for tensor, target in zip(plain, targets, strict=True):
        size += tensor.nbytes
        if way != (tensor.device, target) or size > _MOST_GATHERED:
            yield from _copies(gathered, way)
            gathered, way, size = [], (tensor.device, target), tensor.nbytes
        gathered.append(tensor)
    yield from _copies(gathered, way)


@ordinary_tensors()
def _copies(
    tensors: Sequence[torch.Tensor], way: tuple[torch.device, torch.device] | None
) -> Sequence[torch.Tensor]:
    """way: from which device to which."""
    if way is None or way[0] == way[1]:
        return [tensor.contiguous() for tensor in tensors]
    if len(tensors) == 1:
        return [tensors[0].contiguous().to(way[1])]
    together = torch.cat([_bytes_of(tensor) for tensor in tensors]).to(way[1])
    pieces = together.split([tensor.nbytes for tensor in tensors])
    return [_as(tensor, piece) for tensor, piece in zip(tensors, pieces, strict=True)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _as(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The bytes as a tensor like this one. (A clone starts at an address that suits every type.)"""
    return values.clone().view(like.dtype).view(like.shape)


def pack(tensors: Iterable[torch.Tensor], head: Bytes = NOTHING) -> Bytes:
    """`head`, and then the bytes of the tensors' values, one after the other."""
    tensors = list(tensors)
    message = np.empty(head.size + sum(tensor.nbytes for tensor in tensors), dtype=np.uint8)
    message[: head.size] = head
    at = head.size
    for values in moved(tensors):
        message[at : at + values.nbytes] = _bytes_of(values).numpy()
        at += values.nbytes
    return message


@ordinary_tensors()
def unpack(message: Bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Writes what `pack` made of tensors like these into them."""
    pieces = torch.from_numpy(message).split([tensor.nbytes for tensor in tensors])
    there = moved(pieces, [tensor.device for tensor in tensors])
    for tensor, values in zip(tensors, there, strict=True):
        with writing_to(tensor):
            tensor.copy_(_as(tensor, values))


@ordinary_tensors()
def overwrite(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes these values, of any dtype, device and order in memory, into the tensors."""
    there = moved(values, [tensor.device for tensor in tensors])
    for tensor, new in zip(tensors, there, strict=True):
        with writing_to(tensor):
            tensor.copy_(new)


def checksums_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of the bytes of each tensor."""
    return [checksum32(_bytes_of(values).numpy()) for values in moved(tensors)]
