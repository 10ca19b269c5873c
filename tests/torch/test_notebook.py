"""examples/colab.ipynb as it is kept. (tests/recipes/test_notebook_runs.py runs it.)"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "colab.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def test_it_has_no_outputs() -> None:
    assert [cell for cell in cells("code") if cell["outputs"] or cell["execution_count"]] == []


def test_its_links_lead_somewhere() -> None:
    text = "".join(line for cell in cells("markdown") for line in cell["source"])
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) == 3
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []
