"""What takes the place of PyTorch's collectives in a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.torch.buckets.reduction import ExchangeWork, Op
from gradwire.torch.fsdp.units import DefaultAllGather, DefaultReduceScatter

Explain = Callable[[BaseException], BaseException]


@contextlib.contextmanager
def _explained(explain: Explain) -> Iterator[None]:
    """PyTorch's errors name no rank; `explain` finds one that does."""
    try:
        yield
    except RuntimeError as error:
        found = explain(error)
        if found is error:
            raise
        raise found from error


class _Explained:
    """Before one of PyTorch's own collectives among the bases: its errors name ranks."""

    def __init__(self, explain: Explain) -> None:
        self._explain = explain

    def __call__(self, *args: Any, **settings: Any) -> dist.Work | None:
        with _explained(self._explain):
            work = super().__call__(*args, **settings)  # type: ignore[misc] # the other base has it
        return None if work is None else _ExplainedWork(work, self._explain)


class ExplainedReduceScatter(  # type: ignore[misc] # PyTorch's has no result if it waits
    _Explained, DefaultReduceScatter
):
    pass


class ExplainedAllGather(_Explained, DefaultAllGather):
    pass


class _ExplainedWork(dist.Work):
    def __init__(self, work: dist.Work, explain: Explain) -> None:
        super().__init__()
        self._work, self._explain = work, explain

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with _explained(self._explain):
            return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()


class ShardedReduceScatter(DefaultReduceScatter):
    """`reduce(output, input, op)` fills the output."""

    def __init__(self, reduce: Callable[[torch.Tensor, torch.Tensor, Op], None]) -> None:
        self._reduce = reduce

    def __call__(  # type: ignore[override] # FSDP2 uses no result
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Op,
        async_op: bool = False,
    ) -> None:
        self._reduce(output_tensor, input_tensor, op)


class ShardedAllGather(DefaultAllGather):
    """`gather(output)` begins to fill the output, in which this rank's input is already. inside:
    for the ranks of a machine, which gather in backward if reshard_after_forward is a number."""

    def __init__(
        self,
        gather: Callable[[torch.Tensor], ExchangeWork],
        world_size: int,
        inside: DefaultAllGather,
    ) -> None:
        self._gather = gather
        self._world_size = world_size
        self._inside = inside

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if group.size() != self._world_size:
            return self._inside(output_tensor, input_tensor, group, async_op)
        return self._gather(output_tensor)


class Blanks:
    """Keeps them of one backward pass, in which a parameter may be reduced more than once."""

    def __init__(self) -> None:
        self._parameters: set[nn.Parameter] = set()  # their gradients may be zeros of no rank
        self._silenced: list[tuple[nn.Parameter, Any]] = []

    def begin(self) -> None:
        """Forgets a backward pass that ended with an error."""
        self._parameters.clear()

    def note(self, unused: Iterable[nn.Parameter]) -> None:
        """This rank lacks the gradients of these, which are reduced now."""
        self._parameters.update(p for p in unused if p.grad is None)

    def settle(self, reduced: Sequence[nn.Parameter], unused: Sequence[nn.Parameter]) -> None:
        """Takes note that `reduced` were reduced, and that no rank has a gradient of `unused`."""
        self._parameters -= set(reduced) - set(unused)

    def silence(self, unused: Iterable[nn.Parameter]) -> None:
        """Until `end_silence`, an optimizer that steps in `backward()` leaves these out, to whose
        gradients PyTorch writes zeros now."""
        for parameter in unused:
            if hooks := parameter._post_accumulate_grad_hooks:
                self._silenced.append((parameter, hooks))
                parameter._post_accumulate_grad_hooks = {}

    def end_silence(self) -> None:
        for parameter, hooks in self._silenced:
            parameter._post_accumulate_grad_hooks = hooks
        self._silenced.clear()

    def take_off(self) -> None:
        """When backward ends."""
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters.clear()
