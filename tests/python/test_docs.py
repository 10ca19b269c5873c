"""The documents show what is in the repository, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_program_in_c_is_the_example() -> None:
    """ctest and the install stage compile and run the example itself."""
    text = (ROOT / "docs" / "c.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert program == (ROOT / "examples" / "c" / "compress.c").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = {
        path: {_anchor(line) for line in path.read_text(encoding="utf-8").splitlines()}
        for path in PAGES
    }
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in headings[target], link


def _anchor(line: str) -> str:
    """GitHub's anchor of a heading; "" for other lines."""
    heading = re.match(r"#+ (.*)", line)
    if heading is None:
        return ""
    return re.sub(r"[^\w -]", "", heading.group(1).lower()).replace(" ", "-")
