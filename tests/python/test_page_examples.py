"""The pages' examples of arrays run as they are written, and pages that sources name exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for number, code in enumerate(CODE.findall(page.read_text(encoding="utf-8")))
    if "import numpy as np" in code and "import gradwire\n" in code
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.filterwarnings("ignore::gradwire.NonFiniteWarning")
@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_runs(code: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "page", "exec"), {})
    assert bool(printed.getvalue()) == ("print(" in code)


def test_pages_that_sources_name_exist() -> None:
    """Messages, docstrings and comments send readers to `docs/NAME.md`."""
    named = {
        (page, path.relative_to(ROOT))
        for folder in ("bench", "include", "lab", "python", "scripts", "src", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cc", ".h", ".cu", ".sh") and path.name != "test_site.py"
        for page in re.findall(r"\bdocs/[a-z_/0-9]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 15
    assert [place for place in named if not (ROOT / place[0]).exists()] == []
