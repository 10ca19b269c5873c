"""How the messages of a DeviceExchange travel: over NCCL from the device's memory, or over Gloo."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist

from gradwire.torch.device_exchange import Pull, Push, Received, Step
from gradwire.torch.engine import receive_packet
from gradwire.torch.errors import PeerSilentError
from gradwire.torch.thread import ABORT_SECONDS, join
from gradwire.torch.wire import Bytes, Kind, Wire, WireBrokenError

AUTO, NCCL, GLOO = TRANSPORTS = ("auto", "nccl", "gloo")

# The backend whose collectives take a device's memory.
COLLECTIVE_BACKENDS = {"cuda": NCCL}

_POLL_SECONDS = 20e-6
_LEAVE_SECONDS = 1.0
_LOOK_SECONDS = 1.0  # from one look for lost peers to the next


class Transport(Protocol):
    """Does on every rank what a step asks for, in the same order."""

    def push(self, request: Push) -> Received: ...
    def pull(self, request: Pull) -> Received: ...

    def drop(self) -> None:
        """Lets go of the group. The transport is of no use then."""


def check_transport(name: str) -> None:
    """Raises ValueError for one that there is not."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport is '{name}'; valid ones are: {', '.join(TRANSPORTS)}")


def backend_for(
    name: str, device: torch.device, process_group: dist.ProcessGroup | None
) -> str | None:
    """The backend of the collectives for this device; None: messages are staged over Gloo.

    "auto": as the process group does with tensors of the device.
    """
    backend = COLLECTIVE_BACKENDS.get(device.type)
    if name != AUTO:
        return backend if name == NCCL else None
    entries = dist.get_backend_config(process_group).split(",")
    backends = dict(entry.split(":") for entry in entries)
    return backend if backends.get(device.type) == backend else None


def run_step(step: Step, transport: Transport) -> None:
    """Moves what a DeviceExchange's step asks for, to its end."""
    with contextlib.suppress(StopIteration):
        request = next(step)
        while True:
            request = step.send(_serve(request, transport))


def _serve(request: Push | Pull, transport: Transport) -> Received:
    return transport.push(request) if isinstance(request, Push) else transport.pull(request)


class StagedTransport:
    """Over a wire: messages are copied through page-locked memory of the host."""

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._device = device
        self._sent = torch.empty(0, dtype=torch.uint8)
        self._received = torch.empty(0, dtype=torch.uint8)

    def push(self, request: Push) -> Received:
        host = self._to_host(request.message)
        for peer, part in enumerate(host.split(request.lengths)):
            if peer != self._wire.rank:
                self._wire.send(peer, Kind.PACKET, part.numpy())
        return self._receive(own=None)

    def pull(self, request: Pull) -> Received:
        message = self._to_host(request.message).numpy()
        for peer in self._wire.peers:
            self._wire.send(peer, Kind.PACKET, message)
        return self._receive(own=message)

    def drop(self) -> None:
        pass  # the wire is its owner's

    def _to_host(self, message: torch.Tensor) -> torch.Tensor:
        self._sent = self._room(self._sent, message.numel())
        host = self._sent[: message.numel()]
        host.copy_(message, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host

    def _receive(self, own: Bytes | None) -> Received:
        """Of every rank a message; this rank's is `own`, or empty."""
        begins, lengths = [], []
        end = 0
        for peer in range(self._wire.world_size):
            if peer != self._wire.rank:
                message = receive_packet(self._wire, peer)
            else:
                message = self._sent[:0].numpy() if own is None else own
            self._received = self._room(self._received, end + message.size, keep=end)
            self._received[end : end + message.size] = torch.from_numpy(message)
            if peer != self._wire.rank:
                self._wire.release(peer)
            begins.append(end)
            lengths.append(message.size)
            end += (message.size + 7) // 8 * 8
        self._wire.flush()
        data = self._received[:end].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            # The next message overwrites the host's copy.
            torch.cuda.current_stream(self._device).synchronize()
        return Received(data, begins, lengths)

    def _room(self, buffer: torch.Tensor, size: int, keep: int = 0) -> torch.Tensor:
        """`buffer`, or a larger one with its first `keep` bytes."""
        size = (size + 7) // 8 * 8
        if buffer.numel() >= size:
            return buffer
        larger = torch.empty(2 * size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        larger[:keep] = buffer[:keep]
        return larger


# PyTorch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveTransport:
    """Over collectives of a group whose backend takes the device's memory: NCCL.

    The wire's traffic counts what this rank sends, lengths and padding included, and its
    connections tell of peers that are gone: a collective by itself waits for them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, wire: Wire) -> None:
        self._group: dist.ProcessGroup | None = group
        self._world_size = group.size()
        self._device = device
        self._wire = wire

    def push(self, request: Push) -> Received:
        assert self._group is not None, "it was dropped"
        lengths = request.expected
        if lengths is None:
            sent = self._words(request.lengths)
            came = torch.empty_like(sent)
            dist.all_to_all_single(came, sent, group=self._group)
            self._end(8 * (self._world_size - 1))
            lengths = came.tolist()
        data = request.message.new_empty(sum(lengths))
        dist.all_to_all_single(data, request.message, lengths, request.lengths, group=self._group)
        self._end(sum(request.lengths))
        return Received(data, _starts(lengths), lengths)

    def pull(self, request: Pull) -> Received:
        """Messages take as much room as the largest."""
        assert self._group is not None, "it was dropped"
        lengths = request.expected
        if lengths is None:
            came = self._words([0] * self._world_size)
            own = self._words([request.message.numel()])
            _all_gather(came, own, group=self._group)
            self._end(8 * (self._world_size - 1))
            lengths = came.tolist()
        longest = max(lengths)
        message = request.message
        if message.numel() < longest:
            message = torch.nn.functional.pad(message, (0, longest - message.numel()))
        data = message.new_empty(self._world_size * longest)
        _all_gather(data, message, group=self._group)
        self._end(longest * (self._world_size - 1))
        return Received(data, [k * longest for k in range(self._world_size)], lengths)

    def drop(self) -> None:
        self._group = None

    def _words(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)

    def _end(self, sent: int) -> None:
        """Waits for the collective, as long as the peers are there, unless a graph is captured."""
        traffic = self._wire.traffic
        traffic.sent_bytes += sent
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        done = torch.cuda.current_stream(self._device).record_event()
        begun = looked = time.perf_counter()
        lost: tuple[int, ...] = ()
        while not done.query():
            time.sleep(_POLL_SECONDS)
            now = time.perf_counter()
            if now - looked > _LOOK_SECONDS:
                # Twice: a peer may leave as it should, right behind the last collective.
                gone = self._wire.closed_peers()
                for peer in set(gone).intersection(lost):
                    cause = RuntimeError("it left during a collective")
                    raise WireBrokenError(peer, silent=False, cause=cause)
                looked, lost = now, gone
            if now - begun > self._wire.timeout:
                peers = tuple(self._wire.peers)
                raise PeerSilentError(
                    f"a collective with ranks {peers} took longer than {self._wire.timeout:g} s",
                    peers,
                )
        traffic.waited_seconds += time.perf_counter() - begun


def end_collectives(group: dist.ProcessGroup, broken: bool) -> None:
    """Destroys the group. Where it is `broken`, what is under way is broken off, as far as its
    backend can; else only if the other ranks, for whom NCCL waits, don't leave within a second.
    """

    def destroy() -> None:
        with contextlib.suppress(AssertionError, RuntimeError, ValueError):
            dist.destroy_process_group(group)

    leaving = threading.Thread(target=destroy, name="gradwire-leave", daemon=True)
    if not broken:
        leaving.start()
        if join([leaving], _LEAVE_SECONDS):
            return
    with contextlib.suppress(RuntimeError):  # Gloo can't
        group.abort()
    if broken:
        leaving.start()
    join([leaving], ABORT_SECONDS)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][: len(lengths)]
