"""examples/colab.ipynb runs from top to bottom, and its outputs are not in the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the notebook draws")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "colab.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def test_it_runs_and_sends_less(tmp_path: Path) -> None:
    sources = ["".join(cell["source"]) for cell in cells("code")]
    install, *program = sources
    assert install.startswith("%pip install")
    assert not [source for source in program if re.search(r"^[%!]", source, re.MULTILINE)]
    file = tmp_path / "notebook.py"
    end = "figure.savefig('figure.png')\n"
    file.write_text("\n\n".join([*program, end]), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    table = re.findall(r"^(.+?) +([\d.]+) +([\d,]+) +([\d.]+) x$", result.stdout, re.MULTILINE)
    less = {name: float(ratio) for name, _, _, ratio in table}
    losses = [float(loss) for _, loss, _, _ in table]
    assert len(table) == 4, result.stdout
    assert less["hook, raw"] == 1.0
    assert less["hook, half a byte a value"] > 6
    assert less["LocalSteps, each step"] > 25
    assert less["LocalSteps, every 10 steps"] > 200
    assert max(losses) < 0.7
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_it_has_no_outputs() -> None:
    assert [cell for cell in cells("code") if cell["outputs"] or cell["execution_count"]] == []


def test_its_links_lead_somewhere() -> None:
    text = "".join(line for cell in cells("markdown") for line in cell["source"])
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) == 3
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []
