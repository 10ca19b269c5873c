"""Which tests a plain run leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def long(*values: Any) -> list[Any]:
    """Values of a parameter, or tuples of values of several, with which a test takes long."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for value in values
    ]
