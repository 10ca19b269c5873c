#!/usr/bin/env python3
"""Checks that the search of the site leads newcomers to the pages that they look for.

The site's search takes the sections in which each word of a query begins a word of the title, the
text or the path, and shows those first whose titles have the words, the earlier the better.

Usage: check_search.py SEARCH_JSON     exit status 0: found, 1: what leads elsewhere is printed
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The pages of which one must come first. "" is the first page of the site.
EXPECTED = {
    "install": ("", "docs/start/"),
    "quickstart": ("docs/start/",),
    "quick start": ("docs/start/",),
    "getting started": ("docs/start/",),
    "checkpoint resume": ("docs/reference/checkpoints/",),
    "resume": ("docs/reference/checkpoints/",),
}


def find_first(query: str, index: dict[str, Any]) -> set[str]:
    """The pages whose sections the search may show first."""
    words, split = query.lower().split(), re.compile(index["config"]["separator"])

    def places(text: str) -> list[int | None]:
        """Where the text has each word."""
        parts = split.split(re.sub("<[^>]*>", " ", text).lower())
        return [next((i for i, p in enumerate(parts) if p.startswith(w)), None) for w in words]

    def rank(item: dict[str, Any]) -> list[float] | None:
        titles, texts, paths = (
            places(text) for text in (item["title"], item["text"], " ".join(item["path"]))
        )
        if any(place == (None, None, None) for place in zip(titles, texts, paths, strict=True)):
            return None
        return [float("inf") if place is None else place for place in titles]

    ranks = {item["location"]: found for item in index["items"] if (found := rank(item))}
    return {place.partition("#")[0] for place in ranks if ranks[place] == min(ranks.values())}


def check(index: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each query that leads elsewhere."""
    for query, pages in EXPECTED.items():
        found = find_first(query, index)
        if not found or not found <= set(pages):
            yield f"{query!r} finds {sorted(found) or 'nothing'} first, not {' or '.join(pages)}"


def main(arguments: list[str]) -> int:
    """Command line entry point; returns the exit status."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    lines = list(check(json.loads(Path(arguments[0]).read_text(encoding="utf-8"))))
    for line in lines:
        print(f"check_search: {line}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
