"""Where the engine finds the values of a bucket, whatever device they are on.

The engine works on host memory. Values on the CPU are there already (`Stage`). Those on any other
device are copied to page-locked memory and back on a stream of their own, in pieces, so that
copying, encoding and sending overlap with each other and with the backward pass (`CopyStage`). On a
CUDA device, a build with gradwire's kernels encodes and decodes there instead (`KernelStage`). The
bytes that are sent, and the results, are the same.

What is copied once, such as a model that is sent to other ranks, goes through `moves.moved`.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from gradwire._core import ShardCodecs
from gradwire.torch.parameters import ordinary_tensors
from gradwire.torch.staging.copier import Copier, new_page_locked
from gradwire.torch.staging.pieces import Arriving, KeptBytes, Pieces, ResidualsOnDevice

# The module with the kernels for each kind of device.
KERNEL_MODULES = {"cuda": "gradwire._cuda"}
_BUILD = "in its source tree, pip install . -C cmake.define.GRADWIRE_CUDA=ON"
_HIGH_PRIORITY = -1  # the work of a bucket is short, and other ranks wait for it


def kernels_for(device: torch.device) -> ModuleType | None:
    """The module whose kernels run on this device; None if this build has none."""
    try:
        return importlib.import_module(KERNEL_MODULES[device.type])
    except (KeyError, ModuleNotFoundError):
        return None


def stage_for(device: torch.device, memory: str = "", takes_kernels: bool = True) -> Stage:
    """The stage of values on `device`.

    Args:
        memory: Where residuals lie, see options.Execution.
        takes_kernels: Whether the exchange can be done by kernels.
    """
    kernels = kernels_for(device) if takes_kernels else None
    if kernels is not None:
        return KernelStage(device, kernels, memory)
    return Stage(memory) if device.type == "cpu" else CopyStage(device, memory)


class Stage:
    """Values on the CPU, where they stay.

    Attributes:
        shard_codecs: The kernels, if the values are encoded and decoded where they are.
        devices: Whose work torch.futures.Future must wait for; None: there is none.
    """

    shard_codecs: ShardCodecs | None = None
    devices: list[int | str | torch.device] | None = None

    def __init__(self, memory: str = "") -> None:
        self._memory = memory

    def mark(self) -> Any:
        """For `after`: the work that is queued so far, in the thread that queued it."""
        return None

    def after(self, mark: Any) -> contextlib.AbstractContextManager[None]:
        """Work that is queued inside runs after `mark`, and after the work queued here before."""
        return contextlib.nullcontext()

    def follow(self, mark: Any = None) -> None:
        """What this thread queues from now on runs after `mark` (None: after all copies that are
        queued), for which the host does not wait."""

    def fetch(self, values: torch.Tensor) -> Pieces | Exception | None:
        """Begins to copy the values to the host; for `in_pieces`. In the thread that has them."""
        return None

    @contextlib.contextmanager
    def in_pieces(self, values: torch.Tensor, fetched: Any = None) -> Iterator[Arriving]:
        """Inside, the values come to where the engine works on them, and may be changed there.

        fetched: what `fetch` returned for them, if it was called.
        """
        yield Arriving(values)

    @contextlib.contextmanager
    def on_host(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """As `in_pieces`, when all values are there."""
        with self.in_pieces(values) as arriving:
            arriving.wait()
            yield arriving.values.view(values.shape)

    def keep(self, nbytes: int) -> KeptBytes | None:
        """Zeros for residuals; None: the exchange has them in the host's memory anyway."""
        return None

    def beside(self, values: torch.Tensor) -> torch.Tensor:
        """Memory of the host for values that come and go again and again: `bring` and `put`. On
        the CPU it is the values themselves."""
        return values

    def release_memory(self, dtype: torch.dtype, n: int) -> None:
        """Values of this dtype and number come no more: the host's memory for them is released."""

    def bring(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Copies the values to their place on the host, and waits."""

    def put(self, host: torch.Tensor, values: torch.Tensor) -> None:
        """Copies the values from their place on the host, and waits."""

    def remarks(self) -> tuple[str, ...]:
        """What a user should know."""
        if self._memory != "pinned":
            return ()
        return (
            "memory='pinned' is for a model on a device; this one has all in the host's memory, "
            "which is not page-locked",
        )


class _Streaming(Stage):
    """Work on a stream of its own, beside the program's."""

    def __init__(self, device: torch.device, memory: str) -> None:
        super().__init__(memory)
        self.device = device
        # The CPU, mps and some others have no further stream: there, all work is done in turn.
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._streams = module if hasattr(module, "stream") else None
        self._stream: Any = None
        if self._streams is not None:
            self._stream = self._streams.Stream(device, priority=_HIGH_PRIORITY)
            self.devices = [device]

    def mark(self) -> Any:
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


class HostedStage(Stage):
    """Values that the caller has brought to the host by another stage, which keeps residuals."""

    def __init__(self, other: Stage) -> None:
        super().__init__()
        self._other = other

    def keep(self, nbytes: int) -> KeptBytes | None:
        return self._other.keep(nbytes)


class KernelStage(_Streaming):
    """Values that kernels encode and decode where they are."""

    def __init__(self, device: torch.device, kernels: ModuleType, memory: str = "") -> None:
        super().__init__(device, memory)
        with self.after(None):
            self.shard_codecs = kernels.shard_codecs(
                device.index or 0,
                getattr(self._stream, "cuda_stream", 0),
                memory in ("host", "pinned"),
            )

    @contextlib.contextmanager
    def in_pieces(self, values: torch.Tensor, fetched: Any = None) -> Iterator[Arriving]:
        yield Arriving(values)
        self.mark()  # an error of the device's work is raised here

    def remarks(self) -> tuple[str, ...]:
        if self._memory != "host":
            return ()
        return (
            "residuals are in page-locked memory of the host, as with memory='pinned': the "
            "kernels read no other",
        )


class CopyStage(_Streaming):
    """Values that are copied to the host and back, in their own dtype."""

    def __init__(self, device: torch.device, memory: str = "") -> None:
        super().__init__(device, memory)
        self.copier = Copier(self._streams is not None)
        self._is_page_locked = True
        # Host memory that is free, by dtype and length.
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self._bytes, self._buckets, self._seconds = 0, 0, 0.0
        self.kept_bytes = 0  # copied of residuals

    @ordinary_tensors()
    def fetch(self, values: torch.Tensor) -> Pieces | Exception:
        try:
            with self.copying(), self.after(self.mark()):
                host = self.take_memory(values)
                return Pieces(self, values.view(-1), host)
        except RuntimeError as error:
            return error  # for `in_pieces`, where the session tells the other ranks

    @contextlib.contextmanager
    def in_pieces(self, values: torch.Tensor, fetched: Any = None) -> Iterator[Arriving]:
        pieces = fetched or self.fetch(values)
        if isinstance(pieces, Exception):
            raise pieces
        try:
            yield pieces
            pieces.put_rest()
            self._bytes += 2 * values.nbytes
            self._buckets += 1
        finally:
            self.give_memory(pieces.values)

    @ordinary_tensors()
    def keep(self, nbytes: int) -> KeptBytes | None:
        if self._memory == "device":
            return ResidualsOnDevice(self, nbytes)
        if self._memory == "pinned":
            return KeptBytes(new_page_locked(nbytes, torch.uint8).zero_())
        return None

    @ordinary_tensors()
    def beside(self, values: torch.Tensor) -> torch.Tensor:
        return self.take_memory(values).zero_()

    def bring(self, values: torch.Tensor, host: torch.Tensor) -> None:
        with self.copying(values.nbytes), self.after(self.mark()):
            self.copier.to_host(values, host)
            self._wait()
        self._buckets += 1

    def put(self, host: torch.Tensor, values: torch.Tensor) -> None:
        with self.copying(values.nbytes), self.after(self.mark()):
            self.copier.to_device(host, values)
            self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def copying(self, copied: int = 0) -> Iterator[None]:
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

    def take_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Of the host, flat, for these values."""
        with contextlib.suppress(IndexError):
            return self._free[values.dtype, values.numel()].pop()
        return self._new_memory(values.numel(), values.dtype)

    def give_memory(self, host: torch.Tensor) -> None:
        """Gives it back. It may be taken before the copies in this stream have ended."""
        self._free[host.dtype, host.numel()].append(host)

    def release_memory(self, dtype: torch.dtype, n: int) -> None:
        self._free.pop((dtype, n), None)

    def _new_memory(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        if self._is_page_locked:
            with contextlib.suppress(RuntimeError):  # of a device that can't read such memory
                return torch.empty(n, dtype=dtype, device="cpu", pin_memory=True)
        self._is_page_locked = False
        return torch.empty(n, dtype=dtype, device="cpu")

    def remarks(self) -> tuple[str, ...]:
        said = (
            f"values on {self.device} are copied to the host and encoded there: "
            f"{self._bytes:,} bytes in {self._buckets:,} buckets, {self._seconds:.3g} s of waiting"
        )
        if self._streams is None:
            said += ", as this device has no further stream"
        if not self._is_page_locked:
            said += ", without page-locked memory, which PyTorch does not have for it"
        if self.kept_bytes:
            said += f". Residuals are on the device, and {self.kept_bytes:,} bytes of them copied"
        if self.device.type in KERNEL_MODULES:
            said += f". A build with its kernels encodes on the device: {_BUILD}"
        return (said,)


def is_capturing(values: torch.Tensor) -> bool:
    """Whether the current stream's work becomes a CUDA graph."""
    return values.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
