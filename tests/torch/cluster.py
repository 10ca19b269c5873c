"""Processes that serve many tests, because importing PyTorch takes seconds.

`Cluster(7).run(4, job, *args)` runs `job(*args)` in the first four processes. Each is a rank of a
new default group over Gloo on the loopback interface. The call returns the ranks' results in order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The first optimizer of a process imports torch._dynamo, which takes as long as torch.
PRELOADED = [
    "gradwire.torch.door",
    "gradwire.torch.optimizers.sharded_optimizer",
    "gradwire.torch.server.server_optimizer",
    "torch._dynamo",
]


@dataclass(frozen=True)
class Failed:
    """A rank that raised: the exception's text, its traceback and the `time.monotonic` of it."""

    message: str
    trace: str
    at: float


@dataclass(frozen=True)
class Died:
    """A rank whose process ended without an answer."""

    exit_code: int | None


class Cluster:
    """With `fragile`, a process whose job failed exits, as a program would."""

    def __init__(self, size: int, fragile: bool = False) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._members = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, fragile), daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))

    def start(self, world_size: int, job: Callable[..., Any], *args: Any) -> None:
        """Begins a job; `collect` waits for the results."""
        port = free_port()
        for rank, (_, connection) in enumerate(self._members[:world_size]):
            connection.send((rank, world_size, port, job, args))

    def collect(self, ranks: Iterable[int], seconds: float = 300.0) -> dict[int, Any]:
        """The results of these ranks, or their failures. Raises TimeoutError if a rank is stuck."""
        pending = {self._members[rank][1]: rank for rank in ranks}
        answers: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pending.values())} gave no answer; {answers}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    process = self._members[rank][0]
                    process.join(10)
                    answers[rank] = Died(process.exitcode)
        return answers

    def run(self, world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(world_size, job, *args)
        answers = self.collect(range(world_size))
        for rank, answer in sorted(answers.items()):
            assert not isinstance(answer, Died), f"rank {rank} died: {answer}"
            assert not isinstance(answer, Failed), f"rank {rank}:\n{answer.trace}"
        return [answers[rank] for rank in range(world_size)]

    def close(self, seconds: float = 20.0) -> list[int | None]:
        """Lets every process exit by itself; returns the exit codes (None: it did not exit)."""
        for _, connection in self._members:
            connection.close()
        codes = []
        for process, _ in self._members:
            process.join(seconds)
            codes.append(process.exitcode)
            if process.is_alive():
                process.kill()
        return codes


@contextlib.contextmanager
def started_by_torchrun(port: int) -> Iterator[None]:
    """In a rank's job: the group is gone, and a program finds the ranks as under torchrun."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, place | meet):
        yield


def _serve(connection: Connection, fragile: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, port, job, args = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            # A rank that left the group before all are connected would fail the others.
            dist.barrier()
            answer = job(*args)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answer = Failed(message, traceback.format_exc(), time.monotonic())
        connection.send(answer)
        if isinstance(answer, Failed) and fragile:
            return
        if dist.is_initialized():
            dist.destroy_process_group()


# Processes that start together begin far from each other.
_ports = itertools.count(os.getpid() * 4999)


def free_port() -> int:
    """Lies below the ports that Linux gives to connections (from 32768 on). One of those could be
    taken again between this call and the rank that listens."""
    for number in _ports:
        port = 20000 + number % 12000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError
