"""When buckets are exchanged, and the averages that wait for the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from math import prod
from typing import NamedTuple

import torch
from torch.futures import Future, collect_all

from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.session import Session
from gradwire.torch.checkpoint import MemoryOrder
from gradwire.torch.parameters import ordinary_tensors, writing_to

NEEDS_ALL_GRADIENTS = (
    "overlap=Overlap.NEXT_STEP needs a gradient of every parameter in each step, because the late "
    "average of another one would be lost"
)


class Overlap(Enum):
    """What is computed while buckets are exchanged."""

    ON = "on"  # the rest of `backward()`
    NEXT_STEP = "next_step"  # the next gradient, too: averages arrive one step late
    OFF = "off"  # nothing: the hook waits for each bucket, to measure what overlap saves


def terms_of(overlap: Overlap, has_scaler: bool) -> str:
    """What all ranks must have alike. Raises ValueError for a scaler of late averages."""
    if overlap is not Overlap.NEXT_STEP:
        return ""
    if has_scaler:
        raise ValueError(
            "overlap=Overlap.NEXT_STEP takes no scaler, whose scale may change before a late "
            "average is applied: train in float32 or bfloat16"
        )
    return ", averages one step late"


class _Late(NamedTuple):
    """The average of a parameter's last gradient: flat values, in the bucket's order (None: in
    rows) when the future is done."""

    future: Future[torch.Tensor] | None  # None: it is done
    values: torch.Tensor
    order: MemoryOrder | None

    def in_rows(self) -> torch.Tensor:
        return self.values if self.order is None else self.order.to_rows(self.values)


class LateAverages:
    """Double buffering (QSGD, section 5): a step gets the averages of the step before, and their
    exchange has the time of a whole step. The first step gets zeros."""

    def __init__(self) -> None:
        self._late: dict[str, _Late] = {}  # by parameter
        # By bucket: the one under way, and one to write on, as DDP has waited for its values.
        self._buffers: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    @ordinary_tensors()
    def exchange(self, job: BucketJob, session: Session) -> Future[torch.Tensor]:
        """Exchanges the bucket's gradients. The future holds the bucket, with the averages of the
        step before. Raises RuntimeError for a parameter without a gradient."""
        for place in job.unused.own:
            name, _ = job.tensors[place]
            raise RuntimeError(f"{name} has no gradient in this step: {NEEDS_ALL_GRADIENTS}")
        gradients = self._buffer(job)
        gradients.copy_(job.values)
        begun: Future[torch.Tensor] = Future(devices=session.stage.devices)
        begun.set_result(job.values)
        future = session.submit_for_torch(replace(job, values=gradients))
        start = 0
        before: list[tuple[torch.Tensor, _Late | None, MemoryOrder | None]] = []
        for name, shape in job.tensors:
            part = slice(start, start + prod(shape))
            start = part.stop
            before.append((job.values[part], self._late.get(name), job.orders.get(name)))
            self._late[name] = _Late(future, gradients[part], job.orders.get(name))
        late = {one.future for _, one, _ in before if one is not None and one.future is not None}

        def fill(done: Future[list[Future[torch.Tensor]]]) -> torch.Tensor:
            done.value()  # raises if an exchange has failed
            for target, one, order in before:
                with writing_to(target):
                    if one is None:
                        target.zero_()
                    elif one.order == order:
                        target.copy_(one.values)
                    else:
                        rows = one.in_rows()
                        target.copy_(rows if order is None else order.from_rows(rows))
            return job.values

        return collect_all([begun, *late]).then(fill)

    def _buffer(self, job: BucketJob) -> torch.Tensor:
        """A buffer like the bucket, which nobody reads any more."""
        last, spare = self._buffers.get(job.index, (None, None))
        if spare is None or spare.shape != job.values.shape or spare.dtype != job.values.dtype:
            spare = torch.empty_like(job.values)
        self._buffers[job.index] = spare, last
        return spare

    @ordinary_tensors()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages that the next step gets, by parameter: flat, in rows. Waits for them."""
        for late in self._late.values():
            if late.future is not None:
                late.future.wait()
        return {name: late.in_rows().clone() for name, late in self._late.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._late = {name: _Late(None, values, None) for name, values in state.items()}
