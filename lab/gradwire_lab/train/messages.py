"""What the processes of a training tell each other: JSON, and no pickles, which could run code."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

from gradwire_lab.train.errors import TrainError

_MOST_BYTES = 1 << 28  # of a rank's message, whatever its sender states


def send(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    """Waits for a message. Raises EOFError or OSError if the other end closes."""
    return json.loads(connection.recv_bytes())


def broadcast(message: Any, source: int = 0) -> Any:
    """The message of one rank, on all ranks of the world. Raises TrainError."""
    import torch
    import torch.distributed as dist

    content = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    size = torch.tensor(content.numel())
    dist.broadcast(size, source)
    if not 0 < int(size) <= _MOST_BYTES:
        raise TrainError(f"a rank states a message of {int(size)} bytes: is it of this job?")
    if dist.get_rank() != source:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, source)
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise TrainError("a rank sent something that is no JSON: is it of this job?") from error


def gather(message: Any) -> list[Any]:
    """The messages of all ranks, by rank, on all of them."""
    import torch.distributed as dist

    return [broadcast(message, source) for source in range(dist.get_world_size())]
