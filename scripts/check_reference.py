#!/usr/bin/env python3
"""Checks that the site's reference shows every public function and class of Python.

The pages are made from the sources without running them, so a name that only exists at run time
would be missing without a word.

Usage: check_reference.py HTML_FOLDER     exit status 0: all are there, 1: missing names printed
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import gradwire
import gradwire.torch
import gradwire.weights

PAGES = {"python": gradwire, "torch": gradwire.torch, "weights": gradwire.weights}


def missing_in(page: str, module: ModuleType) -> list[str]:
    """The names of the module that the page does not show."""
    shown = {name for name in module.__all__ if callable(getattr(module, name))}
    return sorted(n for n in shown if f'id="{module.__name__}.{n}"' not in page)


def main() -> int:
    """Command line entry point; returns the exit status."""
    folder = Path(sys.argv[1]) / "docs" / "reference"
    missing = [
        f"{module.__name__}.{name}"
        for place, module in PAGES.items()
        for name in missing_in((folder / place / "index.html").read_text(encoding="utf-8"), module)
    ]
    for name in missing:
        print(f"check_reference: the reference lacks {name}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
