"""What is deprecated works for two minor versions, and no longer (VERSIONING.md)."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import warn_deprecated

ROOT = Path(__file__).parents[2]


def overdue(source: str, version: str) -> Iterator[str]:
    """The deprecations of a file that end with a version or have ended before it."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("warn_deprecated"):
            since = {word.arg: ast.literal_eval(word.value) for word in call.keywords}["since"]
            major, minor = map(int, since.split("."))
            now = tuple(map(int, version.split(".")[:2]))
            if now >= (major, minor + 2):
                yield f"line {call.lineno}: {ast.unparse(call.args[0])}, deprecated since {since}"


def test_the_warning_names_successor_end_and_the_line_of_the_user() -> None:
    module: dict[str, Any] = {"__name__": "gradwire.old", "warn_deprecated": warn_deprecated}
    exec('def old(): warn_deprecated("old()", "new()", since="0.9")', module)
    said = r"old\(\) is deprecated since 0\.9 and ends with 0\.11; write new\(\)"
    with pytest.warns(DeprecationWarning, match=said) as caught:
        module["old"]()
    assert caught[0].filename == __file__
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert source[caught[0].lineno - 1].strip() == 'module["old"]()'


@pytest.mark.parametrize(
    ("version", "is_overdue"),
    [("0.9.0", False), ("0.10.3", False), ("0.11.0", True), ("1.0.0", True)],
)
def test_what_is_overdue_is_found(version: str, is_overdue: bool) -> None:
    source = 'errors.warn_deprecated("a", "b", since="0.9")'
    assert list(overdue(source, version)) == ["line 1: 'a', deprecated since 0.9"] * is_overdue


def test_nothing_is_overdue_and_all_warn_with_the_line_of_the_user() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    files = [*(ROOT / "python").rglob("*.py"), *(ROOT / "lab" / "gradwire_lab").rglob("*.py")]
    assert files
    for file in files:
        source = file.read_text(encoding="utf-8")
        assert list(overdue(source, version)) == [], file
        own = file.name == "errors.py" and file.parent.name == "gradwire"
        assert own or "DeprecationWarning" not in source, f"{file}: call warn_deprecated"
        assert own or "warnings.warn(" not in source, f"{file}: warn_user shows the user's line"
