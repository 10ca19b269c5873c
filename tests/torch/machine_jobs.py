"""The functions that the ranks of a test cluster run with a hierarchical exchange."""

from __future__ import annotations

import os
import socket
import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from gradwire.torch import LocalSteps
from gradwire.torch.errors import OneMachineWarning
from gradwire.torch.network.transport import Kind
from gradwire.torch.network.wire import Wire
from gradwire.torch.options import grouped
from training import Options, Trained, batch, load, make_model, save, train


def train_and_count_by_peer(options: Options) -> tuple[Trained, dict[int, int]]:
    """A training, and the bytes of packets that this rank sent to each other rank."""
    sent: dict[int, int] = {}
    send = Wire.send

    def counting_send(wire: Wire, peer: int, kind: Kind, payload: np.ndarray) -> None:
        if kind is Kind.PACKET:
            sent[peer] = sent.get(peer, 0) + payload.size
        send(wire, peer, kind, payload)

    with mock.patch.object(Wire, "send", counting_send):
        return train(options), sent


@dataclass
class Placed:
    """The results of a local step, or the error."""

    error: str | None
    warnings: list[str]
    parameters: bytes
    saved: bytes | None


def place(
    options_by_rank: list[dict[str, Any]],
    hosts: list[str] | None = None,
    torchrun: list[str] | None = None,
    part: list[int] | None = None,
    saved: list[bytes] | None = None,
) -> Placed | None:
    """Takes one local step.

    `hosts`: the host name of each rank. `torchrun`: the LOCAL_WORLD_SIZE of each rank. `part`: the
    ranks that take part.
    """
    rank = dist.get_rank()
    group = None if part is None else dist.new_group(part)
    result = None
    environment = {} if torchrun is None else {"LOCAL_WORLD_SIZE": torchrun[rank]}
    name = socket.gethostname() if hosts is None else hosts[rank]
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(socket, "gethostname", return_value=name),
    ):
        if part is None or rank in part:
            result = _place(options_by_rank[rank], group, None if saved is None else saved[rank])
    dist.barrier()  # rank 0 has the store
    return result


def _place(options: dict[str, Any], group: Any, saved: bytes | None) -> Placed:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parameters, state, error = b"", None, None
        try:
            model = make_model()
            local = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = LocalSteps(
                local, model, process_group=group, **grouped({"every": 1, **options})
            )
            if saved is not None:
                optimizer.load_state_dict(load(saved))
            inputs, labels = batch(dist.get_rank(), 0)
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            state = save(optimizer.state_dict())
        except (RuntimeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    said = [str(w.message) for w in caught if w.category is OneMachineWarning]
    return Placed(error, said, parameters, state)
