"""The errors of gradwire.weights. Each message names the tensor or the version and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.errors import UserError

_SHOWN = 3  # names in an error


class WeightsError(UserError, ValueError):
    """Tensors cannot be published, applied or compared."""


class StaleBaseError(WeightsError):
    """A delta would be applied to values that it was not made for. Nothing has been changed."""


class MissingVersionError(WeightsError):
    """The store has no such version, or has it no longer."""


class DamagedVersionError(WeightsError):
    """A version's bytes were changed or are missing."""


class ConflictError(WeightsError):
    """Another publisher has published to this store."""


def listed(names: Sequence[str]) -> str:
    """The first of these names, for an error, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    return f"{', '.join(map(repr, names[:_SHOWN]))}{more}"
