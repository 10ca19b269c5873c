"""The two legs in which FSDP2 communicates: their settings, and the collectives of a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.torch.exchange_settings import ExchangeSettings, without_feedback
from gradwire.torch.fsdp.units import DefaultAllGather, DefaultReduceScatter

Explain = Callable[[BaseException], BaseException]

_WEIGHTS = "weights are sent anew each time"


def reduce_scatter_settings(settings: ExchangeSettings) -> ExchangeSettings:
    """For gradients among shards. Raises ValueError for what only exchanges of replicas have."""
    alone = "goes with replicas alone (a mesh of two dimensions)"
    if not settings.info["has_single_legs"]:
        raise ValueError(
            f"exchange='{settings.exchange}' {alone}; among shards, each rank sends each owner its "
            "part"
        )
    if settings.pull_codec is not None:
        raise ValueError(
            f"pull_codec {alone}; weights= compresses what ranks pull of each other's shards"
        )
    if settings.goals:
        raise ValueError(
            f"codec='{settings.goals[0]}' chooses from what both directions send, so it {alone}"
        )
    return replace(settings, leg="reduce_scatter")


def all_gather_settings(
    settings: ExchangeSettings,
    codec: str,
    rules: Sequence[tuple[str, str]],
    shards: dist.ProcessGroup,
) -> ExchangeSettings:
    """For weights; the rest as in `settings`. Raises GradwireError for a bad codec, ValueError for
    one with error feedback."""
    weights = replace(
        settings,
        codec=without_feedback(codec, _WEIGHTS),
        pull_codec=None,
        rules=[(pattern, without_feedback(rule, _WEIGHTS)) for pattern, rule in rules],
        exchange="sharded",
        ranks_per_machine=None,
        leg="allgather",
        process_group=shards,
        chosen=None,
    )
    weights.check()
    return weights


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


class ReplacedCollective(DefaultAllGather, DefaultReduceScatter):
    """Runs in place of one of PyTorch's own, whose memory it takes. FSDP2 names the arguments:
    output_tensor, input_tensor, group, async_op, and the op of a reduction."""

    def __init__(self, run: Callable[..., dist.Work | None]) -> None:
        self._run = run

    def __call__(self, **arguments: Any) -> dist.Work | None:  # type: ignore[override]
        return self._run(**arguments)


def explained(
    collective: DefaultAllGather | DefaultReduceScatter, explain: Explain
) -> ReplacedCollective:
    """One of PyTorch's own, whose errors name ranks."""

    def run(**arguments: Any) -> dist.Work | None:
        with _explained(explain):
            work = collective(**arguments)
        return None if work is None else _ExplainedWork(work, explain)

    return ReplacedCollective(run)


def among_shards(
    gather: Callable[[torch.Tensor], dist.Work], size: int, inside: ReplacedCollective
) -> ReplacedCollective:
    """`gather(output)` begins to fill the output, in which this rank's input is already. inside:
    for the ranks of a machine, which gather in backward if reshard_after_forward is a number."""

    def run(output_tensor: torch.Tensor, group: dist.ProcessGroup, **others: Any) -> Any:
        if group.size() != size:
            return inside(output_tensor=output_tensor, group=group, **others)
        return gather(output_tensor)

    return ReplacedCollective(run)


class _ExplainedWork(dist.Work):
    def __init__(self, work: dist.Work, explain: Explain) -> None:
        super().__init__()
        self._work, self._explain = work, explain

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with _explained(self._explain):
            return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()
