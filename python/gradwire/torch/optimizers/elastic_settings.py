"""Which settings of LocalSteps let ranks come and go."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire.local_schedule import Schedule
from gradwire.torch.records.exchange_settings import ExchangeSettings


def check_elastic(
    on_lost: str,
    given: Mapping[str, bool],
    store: Store | None,
    ranks: int | None,
    shards: dist.ProcessGroup | None,
    schedule: Schedule,
    settings: ExchangeSettings,
) -> None:
    """Raises ValueError or TypeError for settings with which ranks can't come and go, and for those
    of ranks that come and go without on_lost="continue". given: which of these were given."""
    if on_lost == "stop":
        if names := [f"{name}=" for name, is_given in given.items() if is_given]:
            raise ValueError(
                f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} for ranks that come "
                "and go: give on_lost='continue', too, or leave out"
            )
        return
    if on_lost != "continue":
        raise ValueError(f"on_lost is '{on_lost}'; valid are 'stop' and 'continue'")
    if store is None or ranks is None:
        raise ValueError(
            "on_lost='continue' needs store=, where ranks meet although any of them may die, such "
            "as torch.distributed.TCPStore(host, port) of a process of its own, and ranks=, the "
            "number with which the training begins"
        )
    if settings.process_group is not None:
        raise ValueError(
            "on_lost='continue' makes groups of its own over store=: leave out process_group"
        )
    if not isinstance(store, Store):
        raise TypeError(
            f"store is a {type(store).__name__}; a store of torch.distributed is needed, such as "
            "TCPStore(host, port)"
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
