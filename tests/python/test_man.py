"""The manual pages agree with the commands and the C headers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runner import run
from gradwire.cli.app import LAB_COMMANDS, LIBRARY_COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.name: path
    for folder in (ROOT / "man", ROOT / "lab" / "data" / "share" / "man" / "man1")
    for path in folder.glob("*.[0-9]")
}


def read_page(name: str) -> str:
    """A page without roff's escapes."""
    text = PAGES[name].read_text(encoding="utf-8")
    return re.sub(r"\\f[BIR]", "", text).replace("\\-", "-").replace("\\e", "\\")


def test_pages_are_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_man.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("command", [*LIBRARY_COMMANDS, *LAB_COMMANDS])
def test_every_option_of_the_help_is_in_the_page(command: str) -> None:
    described = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", run(command, "--help").out))
    page = read_page(f"gradwire-{command}.1")
    tags = " ".join(re.findall(r"^\.TP\n(.*)$", page, re.MULTILINE))
    assert "--help" in described
    assert described <= set(re.findall(r"--[a-z][a-z-]*", tags))


@pytest.mark.parametrize(("name", "least"), [("gradwire", 40), ("gradwire_mpi", 12)])
def test_every_function_in_c_is_in_the_page(name: str, least: int) -> None:
    header = (ROOT / "include" / "gradwire" / f"{name}.h").read_text(encoding="utf-8")
    functions = set(re.findall(r"^GW_API\b[^;]*?\b(gw_\w+)\(", header, re.MULTILINE))
    assert len(functions) >= least
    page = read_page(f"{name}.3")
    assert set(re.findall(r"\b(gw_\w+)\(", page)) >= functions
    for status in re.findall(r"\bGW_[A-Z_]+ = \d+", header):
        assert status in page


@pytest.mark.without_sanitizers
@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
@pytest.mark.parametrize("page", sorted(PAGES))
def test_roff_has_no_warnings(page: str) -> None:
    result = subprocess.run(
        ["groff", "-man", "-ww", "-z", str(PAGES[page])], capture_output=True, text=True, check=True
    )
    assert result.stdout + result.stderr == ""
