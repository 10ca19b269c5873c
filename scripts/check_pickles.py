#!/usr/bin/env python3
"""Checks that no byte from a file or a network is unpickled, because a pickle can run any code.

Refused in Python, and in the Python of Markdown: modules that unpickle; the collectives of
torch.distributed that carry objects; torch.load without weights_only=True; allow_pickle=True. A
line that ends with "# pickle: WHY" is let through.

Usage: check_pickles.py [ROOT]     exit status 0: clean, 1: offending lines printed
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

MODULES = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
_BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_LET_THROUGH = re.compile(r"# pickle: \w")


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    found = [line for path in _files(root) for line in _complaints(root, path)]
    print("\n".join(found) or "nothing unpickles")
    return 1 if found else 0


def _files(root: Path) -> list[Path]:
    """Those that git would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py", "*.md"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [root / name for name in sorted(set(listed.stdout.split("\0")) - {""})]


def _complaints(root: Path, path: Path) -> Iterator[str]:
    if not path.is_file():
        return  # deleted, and not committed yet
    text = path.read_text(encoding="utf-8")
    for first, code in _python_in(path, text):
        lines = code.splitlines()
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue  # a page may show a part of a program
        for line, what in sorted(_offences(tree)):
            if not _LET_THROUGH.search(lines[line - 1]):
                yield f"{path.relative_to(root)}:{first + line}: {what}"


def _python_in(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Each piece of Python, and the number of lines before it."""
    if path.suffix == ".py":
        yield 0, text
        return
    for block in _BLOCK.finditer(text):
        yield text.count("\n", 0, block.start(2)), textwrap.dedent(block[2])


def _offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _offences_of_import(node)
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            yield node.lineno, f"{node.attr} unpickles: send JSON or tensors"
        if isinstance(node, ast.Call):
            yield from _offences_of_call(node)


def _offences_of_import(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    names = {name.name for name in node.names}
    modules = names
    if isinstance(node, ast.ImportFrom):
        modules = {node.module or ""} if node.level == 0 else set()
        for name in names & COLLECTIVES:
            yield node.lineno, f"{name} unpickles: send JSON or tensors"
    for name in {module.split(".")[0] for module in modules} & MODULES:
        yield node.lineno, f"{name} runs code that it reads: take JSON, NumPy or tensors"


def _offences_of_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    given = {
        keyword.arg: keyword.value.value
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Constant)
    }
    if ast.unparse(call.func) == "torch.load" and given.get("weights_only") is not True:
        yield call.lineno, "torch.load needs weights_only=True, or it runs code"
    if given.get("allow_pickle"):
        yield call.lineno, "allow_pickle=True runs code that a file holds"


if __name__ == "__main__":
    sys.exit(main())
