"""Text that comes from files, made fit for terminals and pages."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """`text` with an escape (such as \\x1b) for each character that is not printable.

    Control characters could command a terminal, marks of direction could reorder a line, and lone
    surrogates cannot be encoded. keep: characters that stay as they are.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
