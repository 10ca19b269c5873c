"""Extensions of Griffe, which reads the docstrings for the site."""

from __future__ import annotations

from typing import Any

import griffe

from site_pages.aligned import as_tables


class AlignedArguments(griffe.Extension):
    """Makes tables of the aligned lists in each docstring."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_tables(obj.docstring.value)


class OverloadsOfStubs(griffe.Extension):
    """Shows functions of which a stub has nothing but overloads, as the first of them."""

    def on_module(self, *, mod: Any, **kwargs: Any) -> None:
        for name, overloads in mod.overloads.items():
            if overloads and name not in mod.members:
                mod.set_member(name, overloads[0])
