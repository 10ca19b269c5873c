"""A device that the CPU plays: it has streams, and copies that take as long as one asks for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from gradwire.torch.staging import stage as staging
from gradwire.torch.staging.copier import Copier


class Stream:
    """Work that threads do in order, as a device does.

    Attributes:
        waits: How often the host has waited for it.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waits = 0
        self._last: Future[None] = Future()
        self._last.set_result(None)

    def enqueue(self, work: Callable[[], object]) -> Future[None]:
        before, done = self._last, Future[None]()
        self._last = done

        def run() -> None:
            try:
                before.result()
                work()
            except BaseException as error:  # as a device that vanishes: all that follows fails
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, daemon=True).start()
        return done

    def record_event(self) -> SimpleNamespace:
        done = self.enqueue(lambda: None)
        return SimpleNamespace(synchronize=lambda: self._wait(done), query=done.done, done=done)

    def wait_event(self, event: SimpleNamespace) -> None:
        self.enqueue(event.done.result)

    def synchronize(self) -> None:
        self._wait(self._last)

    def end(self) -> None:
        """As `synchronize`, for who measures."""
        self._last.result()

    def _wait(self, done: Future[None]) -> None:
        self.waits += 1
        done.result()


class MainStream(Stream):
    """The program's, whose tensors are the host's: what it queues after an event, it does at once,
    so the event must have happened."""

    def wait_event(self, event: SimpleNamespace) -> None:
        event.done.result()


class Streams:
    """A module of a device, as torch.cuda is one."""

    def __init__(self) -> None:
        self.Stream = Stream
        self.main, self._here = MainStream(), threading.local()

    def current_stream(self, device: Any = None) -> Stream:
        found: Stream = getattr(self._here, "stream", self.main)
        return found

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        yield
        self._here.stream = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield


class DelayedCopier(Copier):
    """Copies on the current stream.

    Attributes:
        counts: "copies", and their "bytes".
    """

    def __init__(self, streams: Streams, seconds_of: Callable[[int], float]) -> None:
        """seconds_of: how long a copy of so many bytes takes."""
        super().__init__(has_streams=True)
        self._streams, self._seconds_of = streams, seconds_of
        self.counts: Counter[str] = Counter()

    def to_host(self, values: torch.Tensor, host: torch.Tensor) -> None:
        self._copy(values, host)

    def to_device(self, host: torch.Tensor, values: torch.Tensor) -> None:
        self._copy(host, values)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        def work() -> None:
            time.sleep(self._seconds_of(source.nbytes))
            target.copy_(source)

        self.counts["copies"] += 1
        self.counts["bytes"] += source.nbytes
        self._streams.current_stream().enqueue(work)


class DelayedStage(staging.CopyStage):
    """Of tensors on the CPU, which stands for the device."""

    def __init__(self, seconds_of: Callable[[int], float]) -> None:
        self.streams = Streams()
        with mock.patch.object(torch, "get_device_module", return_value=self.streams):
            super().__init__(torch.device("cuda:0"))
        self.devices = None  # the futures of PyTorch know no such device
        self.copier: DelayedCopier = DelayedCopier(self.streams, seconds_of)

    @property
    def stream(self) -> Stream:
        """That of the copies."""
        found: Stream = self._stream
        return found
