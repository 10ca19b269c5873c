"""What a link saves because it passes `burst` bytes at once: its token buckets.

A bucket holds `burst` bytes and fills at the rate of the link, so it is told in seconds of the
link. Of each message on the longest way, only what is more than its bucket holds takes time:

    saved = min(message, held)
    held  = min(burst, max(0, held - message) + idle time until the next message)

A link has a bucket for each direction. Where pushes come and pulls go, as at a server, the next
message takes the tokens of the other bucket, which has filled meanwhile.
"""

from __future__ import annotations


class Tokens:
    """The buckets of the busiest link, empty at first. All numbers are seconds of the link."""

    def __init__(self, burst: float) -> None:
        self._burst = burst
        self.held = 0.0  # for the next message
        self._other = 0.0  # for the one after it

    def fill(self, idle: float) -> None:
        self.held = min(self._burst, self.held + idle)
        self._other = min(self._burst, self._other + idle)

    def save(self, link: float, other: float, ways: float, pause: float) -> float:
        """What an exchange saves of its `link` seconds, which `ways` messages share. other: what
        the other direction carries meanwhile. pause: idle time before each message."""
        messages = max(1, round(ways))
        saved = 0.0
        for _ in range(messages):
            self.fill(pause)
            at_once = min(link / messages, self.held)
            took = link / messages - at_once
            saved += at_once
            other_held = max(0.0, self._other + took - other / messages)
            self._other, self.held = self.held - at_once, min(self._burst, other_held)
        return saved
