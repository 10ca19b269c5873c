#!/usr/bin/env python3
"""Gathers the pages of the documentation site in build/site/pages; scripts/docs.sh builds it.

The folder mirrors the repository, so that links between pages lead where they lead on GitHub. A
link to a file that is no page leads to a page that shows it. Pages of the reference are made from
the commands' options and from the headers; mkdocs makes those of Python from docstrings.

Usage: make_site.py     needs gradwire in the environment (scripts/setup.sh)
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from site_pages import commands, headers
from site_pages.links import Mirror

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "site" / "pages"
REFERENCE = "docs/reference"

GATHERED = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "VERSIONING.md"),
    "rtl/README.md",
    *("docs/*.md", "docs/*/*.md", "docs/results/evaluation/*.md", "spec/*.md"),
    "src/codecs/*/spec.md",
)


def main(arguments: list[str]) -> int:
    """Command line entry point; returns the exit status."""
    if arguments:
        print(__doc__)
        return 2
    if PAGES.exists():
        shutil.rmtree(PAGES)
    mirror = Mirror(ROOT, PAGES)
    for pattern in GATHERED:
        for page in sorted(ROOT.glob(pattern)):
            mirror.add_page(page)
    made = {"commands.md": commands.page(), **headers.pages(ROOT / "include" / "gradwire")}
    for name, text in made.items():
        mirror.write(f"{REFERENCE}/{name}", text)
    print(f"make_site: {mirror.count} pages in {PAGES.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
