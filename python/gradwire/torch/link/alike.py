"""A text that must be equal on all ranks in each step, such as the options of an optimizer.

A rank whose text has changed announces its digest, so a step without a change costs nothing. Every
rank knows all announcements when the exchange is done. If all ranks announced the same, or nobody
anything, the texts are equal; otherwise all ranks compare them.
"""

from __future__ import annotations

import hashlib

from gradwire.torch.link.announcements import Announcements
from gradwire.torch.link.engine import agree
from gradwire.torch.link.transport import Kind, Transport

_DIGEST_BYTES = hashlib.sha256().digest_size


class Alike:
    """What this rank had in the last step."""

    def __init__(self) -> None:
        self._text = ""

    def begin(self, text: str, wire: Transport, passes_on: bool) -> Announcements:
        """Begins a step with this text. Empty: there is none in this step, on all ranks.
        passes_on: see Announcements."""
        own = None
        if text not in ("", self._text):
            self._text = text
            own = hashlib.sha256(text.encode()).digest()
        self._said = Announcements(Kind.ALIKE, _DIGEST_BYTES, wire, passes_on, own)
        return self._said

    def check(self, wire: Transport) -> None:
        """Ends the step; all ranks call it when its exchange is done.

        Raises PeerMismatchError on all ranks if the texts of two differ, naming both and the first
        line in which they differ.
        """
        said = self._said
        if said.by_rank and not (said.are_complete and len(set(said.by_rank.values())) == 1):
            agree(self._text, wire)
