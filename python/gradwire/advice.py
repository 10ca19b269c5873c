"""Which codec to begin with, and which codecs do not suit every place."""

from __future__ import annotations

from gradwire._core import AutoGoal, Compressor, is_coarse, is_goal, spell_out_codec

RECOMMENDED = spell_out_codec("small")


def sends_coarsely(codec: str) -> bool:
    """Whether a codec or an `auto` text sends most values rarely, or with an error as large as the
    value."""
    return AutoGoal(codec).is_coarse if is_goal(codec) else is_coarse(codec)


def keeps_residual(codec: str) -> bool:
    """Whether a codec or an `auto` text has error feedback."""
    return is_goal(codec) or Compressor(codec, 1).residual is not None
