"""What the steps of a training have sent and taken, and what was said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire._core import Layout, scale_growth
from gradwire.errors import warn_user
from gradwire.torch.errors import (
    GrowingScalesWarning,
    NonFiniteStepWarning,
    OutgrownResidualWarning,
    UnmatchedPatternWarning,
)
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.stats import OutgrownResidual, RawTensor, StepCounters, TensorTraffic, Totals


@dataclass
class Ledger:
    """The counters of a runner. Another runner can go on from them.

    Attributes:
        totals: sums over all steps.
        last_step: the last complete one.
        step: the one under way; its number is -1 before the first.
        warned: the warnings that are said once and have been said.
        raw_tensors: those of buckets that are no more.
        traffic: what was encoded in buckets that are no more.
        of_changes: as in ExchangeSettings.
    """

    totals: Totals = field(default_factory=Totals)
    last_step: StepCounters = field(default_factory=StepCounters)
    step: StepCounters = field(default_factory=lambda: StepCounters(step=-1))
    warned: set[type[Warning]] = field(default_factory=set)
    raw_tensors: tuple[RawTensor, ...] = ()
    traffic: tuple[TensorTraffic, ...] = ()
    of_changes: bool = False
    _sent_before: int = 0

    def go_on_from(self, earlier: Ledger) -> None:
        self.totals, self.last_step = earlier.totals, earlier.last_step
        self.warned, self.traffic = earlier.warned, earlier.traffic

    def begin(self, step: StepCounters, sent_bytes: int) -> None:
        """sent_bytes: of the transport, until now."""
        self.step, self._sent_before = step, sent_bytes

    def end(self, sent_bytes: int) -> None:
        """Counts the step under way."""
        step = self.step
        sent = sent_bytes - self._sent_before
        step.control_bytes = sent - step.push_bytes - step.pull_bytes - step.local_bytes
        self.totals.add(step)
        self.last_step = step

    def skip(self, why: str) -> None:
        """The step under way is skipped."""
        self.step.skipped = True
        unit, done = "step", "the step is skipped (after a hook, by a gradient scaler)"
        if self.of_changes:
            why = why.replace("the gradient of", "the change of", 1)
            unit, done = "exchange", "all ranks go back to the values of the exchange before"
        self.warn_once(
            f"{unit} {self.step.step}: {why}, so that {done}, and the residuals are kept. Further "
            f"{unit}s like this are only counted (stats().skipped_steps)",
            NonFiniteStepWarning,
        )

    def note_outgrown(self, found: OutgrownResidual) -> None:
        if any(noted.name == found.name for noted in self.totals.outgrown_residuals):
            return
        self.totals.outgrown_residuals.append(found)
        # The text differs from tensor to tensor, so that Python shows each once.
        warn_user(found.describe(), OutgrownResidualWarning)

    def warn_of_unmatched(self, layouts: Sequence[Layout]) -> None:
        """layouts: of all buckets of the model."""
        if UnmatchedPatternWarning in self.warned:
            return
        self.warned.add(UnmatchedPatternWarning)
        for pattern in layouts[0].unmatched:
            if all(pattern in layout.unmatched for layout in layouts):
                warn_user(
                    f"no tensor of the model matches {pattern!r}, which rules= or exclude= has; "
                    "names are those of model.named_parameters()",
                    UnmatchedPatternWarning,
                )

    def warn_once(self, text: str, category: type[Warning]) -> None:
        if category not in self.warned:
            self.warned.add(category)
            warn_user(text, category)


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
