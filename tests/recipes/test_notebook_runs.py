"""examples/colab.ipynb runs from top to bottom in a kernel of Jupyter, as on Colab."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="scripts/test.sh recipes installs it")

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "colab.ipynb"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of all cells but the one that installs gradwire from a wheel, which is there already."""
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    install = [cell for cell in notebook.cells if cell.source.startswith("%pip install")]
    assert len(install) == 1
    notebook.cells.remove(install[0])
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder))  # no start-up files of the user's
        NotebookClient(notebook, timeout=240, resources={"metadata": {"path": folder}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs]


def test_every_way_learns_from_fewer_bytes(outputs: list[Any]) -> None:
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    table = re.findall(r"^(.+?) +([\d.]+) +([\d,]+) +([\d.]+) x$", printed, re.MULTILINE)
    less = {name: float(ratio) for name, _, _, ratio in table}
    assert len(table) == 4, printed
    assert less["hook, raw"] == 1.0
    assert less["hook, half a byte a value"] > 6
    assert less["LocalSteps, each step"] > 25
    assert less["LocalSteps, every 10 steps"] > 200
    assert max(float(loss) for _, loss, _, _ in table) < 0.7


def test_the_losses_are_drawn(outputs: list[Any]) -> None:
    (picture,) = (output.data for output in outputs if "image/png" in output.get("data", {}))
    assert len(picture["image/png"]) > 10_000
