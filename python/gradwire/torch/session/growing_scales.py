"""Warns of codecs whose scales grow from hop to hop of a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire._core import Layout, scale_growth
from gradwire.torch.errors import GrowingScalesWarning
from gradwire.torch.records.exchange_settings import ExchangeSettings
from gradwire.torch.session.ledger import Ledger

# In rings whose sums may grow further, least squares and a small network lost accuracy or diverged
# (docs/reference/exchanges.md).
_MOST_GROWTH = 8.0


def warn_of_growing_scales(
    settings: ExchangeSettings, layout: Layout, world_size: int, ledger: Ledger
) -> None:
    machines = settings.machines(world_size)
    codecs = [segment["push_codec"] for segment in layout.segments]
    _warn_of_growth(settings.inner_info, machines, codecs, ledger)
    if settings.within_info is not None:
        size, within = world_size // machines, settings.choice["within_codec"]
        _warn_of_growth(settings.within_info, size, [within], ledger)


def _warn_of_growth(
    info: dict[str, Any], world_size: int, codecs: Sequence[str], ledger: Ledger
) -> None:
    if not info["encodes_sums_on_the_way"] or world_size < 3:
        return
    growth, codec = max(((scale_growth(c), c) for c in codecs), default=(1.0, ""))
    whole = growth ** (world_size - 1)
    if whole <= _MOST_GROWTH:
        return
    ledger.warn_once(
        f"{codec} in a ring of {world_size} ranks: every hop encodes the sum so far and what "
        f"it still owes, so the values that are sent can grow {growth:.3g} times in each hop "
        f"and {whole:.3g} times on the whole way; the training loses accuracy or diverges. "
        f"Take codec='{info['default_codec']}', or exchange='sharded'",
        GrowingScalesWarning,
    )
