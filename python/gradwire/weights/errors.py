"""The errors of gradwire.weights. Each message names the tensor or the version and the remedy."""

from __future__ import annotations

from gradwire.errors import UserError


class WeightsError(UserError, ValueError):
    """Tensors cannot be published, applied or compared."""


class StaleBaseError(WeightsError):
    """A delta would be applied to values that it was not made for. Nothing has been changed."""


class DamagedVersionError(WeightsError):
    """A version's bytes were changed or are missing."""


class ConflictError(WeightsError):
    """Another publisher has published to this store."""
