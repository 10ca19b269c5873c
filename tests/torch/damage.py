"""Flips one bit of a message between the rank that sends it and the one that receives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import server_jobs
from gradwire.torch import LocalSteps
from gradwire.torch.network.transport import NOTHING, OVERHEAD_BYTES, Bytes, Kind
from gradwire.torch.network.wire import HEAD_BYTES, Wire
from member_jobs import Ended, Plan, train
from server_jobs import Job, Served, run
from training import TwoPaths, digest, make_model


@dataclass(frozen=True)
class Damage:
    """Rank `sender` sends its message number `number` of this kind, counted from 0, and one bit of
    its byte number `place` is another one; the first bytes are those that gradwire adds."""

    sender: int
    kind: Kind
    place: int = OVERHEAD_BYTES
    number: int = 0

    def begin(self) -> None:
        """In the sender's process, which is of no use afterwards."""
        send, start = Wire.send, Wire._start_send
        before, offset = -1, 0
        under_way = False

        def send_and_note(wire: Wire, peer: int, kind: Kind, *args: Any, **named: Any) -> None:
            nonlocal before, offset, under_way
            before += kind is self.kind
            under_way, offset = kind is self.kind and before == self.number, 0
            send(wire, peer, kind, *args, **named)

        def start_damaged(wire: Wire, peer: int, data: np.ndarray, tag: int) -> Any:
            nonlocal offset
            place, offset = self.place - offset, offset + data.size
            if under_way and 0 <= place < data.size:
                data = data.copy()
                data[place] ^= 4
            return start(wire, peer, data, tag)

        Wire.send, Wire._start_send = send_and_note, start_damaged  # type: ignore


@dataclass(frozen=True)
class Excess:
    """Rank `sender` sends its message number `number` of this kind with `more` bytes at its end."""

    sender: int
    kind: Kind
    more: int = 1
    number: int = 0

    def begin(self) -> None:
        """As Damage.begin."""
        send = Wire.send
        before = -1

        def send_more(
            wire: Wire, peer: int, kind: Kind, payload: Bytes = NOTHING, *args: Any, **named: Any
        ) -> None:
            nonlocal before
            before += kind is self.kind
            if kind is self.kind and before == self.number:
                payload = np.concatenate([payload, np.zeros(self.more, dtype=np.uint8)])
            send(wire, peer, kind, payload, *args, **named)

        Wire.send = send_more  # type: ignore


@dataclass(frozen=True)
class Replacement:
    """Rank `sender` sends other bytes in place of its message number `number` of this kind, with
    the checksum of these: `payload`, or the message without its last `less` bytes."""

    sender: int
    kind: Kind
    payload: bytes = b""
    less: int = 0
    number: int = 0

    def begin(self) -> None:
        """As Damage.begin."""
        send = Wire.send
        before = -1

        def send_other(
            wire: Wire, peer: int, kind: Kind, payload: Bytes = NOTHING, *args: Any, **named: Any
        ) -> None:
            nonlocal before
            before += kind is self.kind
            if kind is self.kind and before == self.number:
                other = np.frombuffer(self.payload, dtype=np.uint8)
                payload = payload[: -self.less] if self.less else other
            send(wire, peer, kind, payload, *args, **named)

        Wire.send = send_other  # type: ignore


IN_THE_REST = HEAD_BYTES + 5


def run_damaged(job: Job, damage: Damage | Excess | Replacement) -> Served:
    """Trains a model that has a buffer."""
    if dist.get_rank() == damage.sender:
        damage.begin()
    with mock.patch.object(server_jobs, "make_model", _make_with_buffer):
        return run(job)


def _make_with_buffer() -> TwoPaths:
    model = make_model()
    model.register_buffer("seen", torch.zeros(3))
    return model


def run_behind(job: Job, damage: Damage) -> Served:
    """Worker 0 is away for more versions than the server keeps."""
    return run_damaged(replace(job, stalled=0), damage)


def make_replicas(damage: Damage | Excess) -> str:
    """Rank 0's parameters are taken over."""
    if dist.get_rank() == damage.sender:
        damage.begin()
    model = make_model()
    optimizer = LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), model, every=2)
    optimizer.close()
    return digest(model)


def train_damaged(damage: Damage, port: int, number: int, plan: Plan) -> Ended:
    damage.begin()
    return train(port, number, plan)
