from __future__ import annotations

import public_interface


def test_names_and_help_are_those_of_the_file() -> None:
    """If the change is meant: .venv/bin/python tests/python/public_interface.py"""
    frozen = public_interface.FILE.read_text(encoding="utf-8")
    assert "".join(public_interface.describe()) == frozen
