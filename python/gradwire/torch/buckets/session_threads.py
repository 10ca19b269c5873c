"""The threads of a session, and the buckets that wait for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.network.connection import CommunicationThread
from gradwire.torch.parameters import ordinary_tensors
from gradwire.torch.staging.stage import Stage


class SessionThreads(CommunicationThread):
    """A communication thread, and one that encodes the next bucket while that waits for peers."""

    def __init__(self) -> None:
        super().__init__()
        self._encoder: CommunicationThread | None = None  # from its first job on

    def encode(self, job: Callable[[], None]) -> None:
        """Runs a job that waits for no peer. For one thread at a time."""
        if self._encoder is None:
            self._encoder = CommunicationThread("gradwire-encoder")
        self._encoder.submit(job)

    def drain_encoder(self, seconds: float) -> None:
        """Waits until jobs of `encode` have run."""
        if self._encoder is not None:
            self._encoder.drain(seconds)

    def stop(self, seconds: float) -> bool:
        stopped = super().stop(seconds)
        return stopped and (self._encoder is None or self._encoder.stop(seconds))


class JobsAtOnce:
    """Jobs that run in the thread that submits them, apart from what the program has set there."""

    def submit(self, job: Callable[[], None]) -> None:
        with ordinary_tensors():
            job()

    def drain(self, seconds: float) -> bool:
        return True

    def stop(self, seconds: float) -> bool:
        return True

    def encode(self, job: Callable[[], None]) -> None:
        job()

    def drain_encoder(self, seconds: float) -> None:
        pass


class ComingBucket:
    """A bucket in the queue, whose values are on their way to the host. To be left when its result
    is there."""

    def __init__(self, job: BucketJob, stage: Stage) -> None:
        self.job = job
        self._stage, self._fetched = stage, stage.fetch(job.values)
        self._used = contextlib.ExitStack()
        self._on_host: BucketJob | None = None

    @property
    def is_there(self) -> bool:
        """Whether it can be encoded at once, and has not been asked for."""
        if self._on_host is not None or isinstance(self._fetched, Exception):
            return False
        return self._fetched is None or self._fetched.is_there

    def on_host(self) -> BucketJob:
        """The job with the values that the engine works on."""
        if self._on_host is None:
            pieces = self._stage.in_pieces(self.job.values, self._fetched)
            arriving = self._used.enter_context(pieces)
            self._on_host = replace(self.job, values=arriving.values, arriving=arriving)
        return self._on_host

    def __enter__(self) -> None:
        pass

    def __exit__(self, *of: Any) -> bool | None:
        return self._used.__exit__(*of)
