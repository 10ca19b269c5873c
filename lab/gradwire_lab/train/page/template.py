"""Fills page.html. Text of files is escaped, and has no character that is not printable."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from gradwire.errors import printable


def render(plots: str, plotly: str, **facts: Any) -> str:
    """The page. plots: JSON; plotly: the library; both stand in scripts as they are."""
    environment = Environment(
        loader=PackageLoader("gradwire_lab.train", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template("page.html").render(
        plots=Markup(plots),
        plotly=Markup(plotly),
        css=_part("page.css"),
        js=_part("page.js"),
        **facts,
    )


def _printed(value: object) -> object:
    return value if isinstance(value, Markup) else printable(str(value), keep="\n")


def _breakable(cell: object) -> Markup:
    """A text that may be broken after its commas."""
    return escape(_printed(cell)).replace(",", Markup(",<wbr>"))


def _part(name: str) -> Markup:
    return Markup(files("gradwire_lab.train.page").joinpath(name).read_text(encoding="utf-8"))
