"""An extension of Griffe, which reads the docstrings for the site."""

from __future__ import annotations

from typing import Any

import griffe

from site_pages.aligned import as_tables


class AlignedArguments(griffe.Extension):
    """Makes tables of the aligned lists in each docstring."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_tables(obj.docstring.value)
