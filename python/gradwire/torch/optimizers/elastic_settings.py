"""Which settings of LocalSteps let ranks come and go."""

from __future__ import annotations

import torch.distributed as dist

from gradwire.local_schedule import Schedule
from gradwire.torch.records.exchange_settings import ExchangeSettings


def check_elastic(
    shards: dist.ProcessGroup | None, schedule: Schedule, settings: ExchangeSettings
) -> None:
    """Raises ValueError for settings with which ranks can't come and go, if they shall."""
    if settings.role is not None:
        raise ValueError("role is for ServerOptimizer: the ranks of LocalSteps are all alike")
    if not settings.goes_on:
        return
    if settings.store is None:
        raise ValueError(
            "on_lost='continue' needs store=, where ranks meet although any of them may die, such "
            "as torch.distributed.TCPStore(host, port) of a process of its own, and ranks=, the "
            "number with which the training begins"
        )
    if shards is not None:
        raise ValueError(
            "on_lost='continue' does not go with a model that fully_shard has sharded: the ranks "
            "of a replica would have to come and go together"
        )
    if schedule.is_back_to_back:
        raise ValueError(
            f"on_lost='continue' needs a delay below every={schedule.every}: with delay=every the "
            "changes leave the model when they are sent, and would be lost with an exchange"
        )
    if settings.info["between_machines"]:
        raise ValueError(
            f"on_lost='continue' does not go with exchange='{settings.exchange}', which needs the "
            "same number of ranks on every machine"
        )
    if settings.goals:
        raise ValueError(
            f"on_lost='continue' does not go with {settings.goals[0]}: a newcomer does not know "
            "what the others measured. Give a codec"
        )
