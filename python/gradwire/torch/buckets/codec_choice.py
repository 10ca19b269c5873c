"""The codecs that hold now: those of the settings, or those that are chosen for `auto` texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.checkpoint import StateDict
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings
from gradwire.torch.network.transport import Transport
from gradwire.torch.stats import ChosenCodec

if TYPE_CHECKING:
    from gradwire.torch.buckets.auto_codecs import AutoCodecs


class CodecChoice:
    """The codecs of the settings, or those that are chosen for their `auto` texts.

    Attributes:
        settings: with the codecs that hold now.
    """

    def __init__(self, settings: ExchangeSettings) -> None:
        self.settings = settings
        self._auto: AutoCodecs | None = None
        if settings.goals:
            from gradwire.torch.buckets.auto_codecs import AutoCodecs

            self._auto = AutoCodecs(settings.goals, settings.remedy)
        self._decides = False  # whether a decision ends the step under way

    @property
    def trying(self) -> AutoCodecs | None:
        """Tries codecs on what the step under way sends, if a decision ends it."""
        return self._auto if self._decides else None

    def begin_step(self, raw: bool) -> None:
        self._decides = self._auto is not None and not raw and self._auto.is_due()

    def end_step(self, wire: Transport) -> bool:
        """Ends a step that was compressed. Returns whether a codec changed."""
        return self._auto is not None and self._take(self._auto.end_step(self._decides, wire))

    def prepare(self, job: BucketJob, wire: Transport) -> None:
        """Chooses for the tensors of a new bucket."""
        if self._auto is None or job.raw:
            return
        layout = self.settings.bucket_layout(
            job.tensors, wire.world_size, RAW_CODECS[job.values.dtype]
        )
        values = job.all_values().float().cpu().numpy()
        self._take(self._auto.prepare(layout, values, wire))

    def load(self, state: StateDict) -> None:
        """Goes on with what a saved state has chosen."""
        if self._auto is not None and (chosen := state.get("auto")) is not None:
            self._auto.load_state_dict(chosen)
            self._take(True)

    def state_dict(self) -> StateDict | None:
        """None if nothing is chosen."""
        return None if self._auto is None else self._auto.state_dict()

    def summary(self) -> tuple[ChosenCodec, ...]:
        return () if self._auto is None else self._auto.summary()

    def remarks(self) -> tuple[str, ...]:
        return () if self._auto is None else self._auto.remarks()

    def _take(self, changed: bool) -> bool:
        if changed and self._auto is not None:
            self.settings = replace(self.settings, chosen=self._auto.chosen)
        return changed
