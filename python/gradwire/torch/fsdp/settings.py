"""The settings of the two legs in which FSDP2 communicates, and what does not go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from gradwire.torch.exchange_settings import ExchangeSettings, without_feedback

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
