"""The reductions of torch.distributed that an exchange's average can stand for."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

Op = dist.ReduceOp | dist.ReduceOp.RedOpType
_REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def is_reduction(op: Op) -> bool:
    """Whether it is a sum or an average."""
    # A ReduceOp equals a RedOpType, but not the reverse, on which `in` would rely.
    return any(op == valid for valid in _REDUCTIONS)


def factor_of(op: Op, world_size: int) -> int:
    """By which the average of all ranks is multiplied."""
    return world_size if op == dist.ReduceOp.SUM else 1


def write_shard(reduced: torch.Tensor, output: torch.Tensor, rank: int, world_size: int) -> None:
    """Writes what a reduce-scatter gives this rank: `reduced` (flat) holds one shard after the
    other."""
    output.view(-1).copy_(reduced.view(world_size, -1)[rank])


class ExchangeWork(dist.Work):
    """Waits for a future of Session.start_for_torch. (PyTorch's own Work of a future hides its
    error.) `outputs`: what a caller of C++ gets as the collective's result."""

    def __init__(
        self, future: torch.futures.Future[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._future = future
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """timeout: 0 for none. Raises RuntimeError after it, as Gloo's work does; the exchange goes
        on, and may be waited for again."""
        if timeout > timedelta(0):
            is_over = threading.Event()
            self._future.add_done_callback(lambda _: is_over.set())
            if not is_over.wait(timeout.total_seconds()):
                raise RuntimeError("Operation timed out!")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        outputs = self._outputs
        # C++ sees an error only if a callback raises it.
        return self._future.then(lambda finished: (finished.value(), outputs)[1])
