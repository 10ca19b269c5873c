"""What of a rank's changes alters the model in bfloat16.

PULSELoCo (Miahi and Belilovsky 2026, arXiv:2602.03839) is DiLoCo whose ranks send only these, and
keep the rest as error feedback: the next forward pass, which rounds the model to bfloat16, would
not see it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from gradwire.torch.parameters import ordinary_tensors
from gradwire.torch.staging.moves import moved


class Gate:
    """Of the changes of a fragment lets through those that alter the rounding of its anchors.

    Attributes:
        kept: What this rank has not sent yet, f32, for each parameter.
    """

    @ordinary_tensors()
    def __init__(self, anchors: Sequence[torch.Tensor]) -> None:
        self.kept = [torch.zeros_like(anchor) for anchor in anchors]
        self._next: list[torch.Tensor] | None = None  # `kept`, if the exchange under way counts

    @ordinary_tensors()
    def split(
        self,
        changes: Sequence[torch.Tensor],
        anchors: Sequence[torch.Tensor],
        unused: Collection[int],
        decay: float,
    ) -> None:
        """Adds what is kept to the changes, and makes zeros of those that the gate keeps.

        Args:
            changes: By which the parameters are below the anchors, f32; overwritten.
            anchors: Which the changes will be subtracted from.
            unused: Places of parameters without a gradient. What is owed to one that did not change
                stays as it is.
            decay: By which what is kept is multiplied.
        """
        self._next = []
        places = zip(changes, anchors, self.kept, strict=True)
        for place, (change, anchor, kept) in enumerate(places):
            if place in unused and not change.any():
                self._next.append(kept)
                continue
            owed = change + kept
            is_seen = anchor.bfloat16() != (anchor - owed).bfloat16()
            change.copy_(owed.where(is_seen, 0.0))
            self._next.append(owed.where(~is_seen, 0.0).mul_(decay))

    def confirm(self) -> None:
        """The exchange of the last `split` counts: all ranks apply it."""
        if self._next is not None:
            self.kept, self._next = self._next, None

    def state_dict(self) -> dict[str, Any]:
        following = None if self._next is None else [values.clone() for values in self._next]
        return {"kept": [values.clone() for values in self.kept], "next": following}

    @ordinary_tensors()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        def here(saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            there = moved(saved, [kept.device for kept in self.kept])
            return [values.clone() for values in there]

        self._next = None if state["next"] is None else here(state["next"])
        self.kept = here(state["kept"])
