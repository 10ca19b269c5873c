"""What the processes of a training tell each other: JSON, and no pickles, which could run code."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from gradwire_lab.train.errors import TrainError

if TYPE_CHECKING:
    import torch

_MOST_BYTES = 1 << 28  # of a rank's message, whatever its sender states


def send(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    """Waits for a message. Raises EOFError or OSError if the other end closes."""
    return json.loads(connection.recv_bytes())


def broadcast(message: Any) -> Any:
    """Rank 0's message, on all ranks of the world."""
    import torch
    import torch.distributed as dist

    content = _encode(message)
    size = torch.tensor(content.numel())
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        content = torch.empty(_checked(size), dtype=torch.uint8)
    dist.broadcast(content, 0)
    return _decode(content)


def gather(message: Any) -> list[Any]:
    """The messages of all ranks, by rank, on rank 0; nothing on the others."""
    import torch
    import torch.distributed as dist

    content = _encode(message)
    sizes = [torch.empty_like(torch.tensor(0)) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(content.numel()))
    most = max(map(_checked, sizes))
    padded = torch.nn.functional.pad(content, (0, most - content.numel()))
    everyone = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, everyone)
    return [_decode(one[:n]) for one, n in zip(everyone, sizes, strict=True)] if everyone else []


def _encode(message: Any) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _decode(content: torch.Tensor) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise TrainError("a rank sent something that is no JSON: is it of this job?") from error


def _checked(size: torch.Tensor) -> int:
    """Raises TrainError for a size that no message has."""
    if not 0 < int(size) <= _MOST_BYTES:
        raise TrainError(f"a rank states a message of {int(size)} bytes: is it of this job?")
    return int(size)
