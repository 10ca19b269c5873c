"""The adapters of frameworks say how they are used, and what they need that is not installed."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import gradwire.contrib

pytest.importorskip("torch", reason="the adapters need PyTorch")

ADAPTERS = {
    "accelerate": "accelerate",
    "flower": "flwr",
    "lightning": "lightning",
    "nvflare": "nvflare",
    "ray": "ray",
    "torchft": "torchft",
    "transformers": "transformers",
}


@pytest.mark.parametrize(("adapter", "package"), ADAPTERS.items())
def test_a_missing_framework_is_named(
    adapter: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"gradwire.contrib.{adapter}"
    source = "'.[flower]'" if adapter == "flower" else "'.[recipes]'"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"{module} needs .*{re.escape(source)}"):
        importlib.import_module(module)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_takes_three_lines(adapter: str) -> None:
    """Its page begins with a program, whose import and few more lines are gradwire's."""
    file = Path(gradwire.contrib.__path__[0], f"{adapter}.py")
    module = ast.parse(file.read_text(encoding="utf-8"))
    lines = re.findall(r"^    (.+)$", ast.get_docstring(module) or "", re.MULTILINE)
    imported, *program = ast.parse("\n".join(lines)).body
    assert isinstance(imported, ast.ImportFrom)
    assert imported.module == f"gradwire.contrib.{adapter}"
    ours = {alias.name for alias in imported.names}
    made = {n.name for n in module.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assert ours <= made
    ours |= {"way"}
    taking = [s for s in program if ours & {n.id for n in ast.walk(s) if isinstance(n, ast.Name)}]
    assert 1 <= len(taking) <= 2
