"""The file of what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "rivals.jsonl"


def read(file: Path = RESULTS) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def add(line: dict[str, Any], file: Path = RESULTS) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")


def rates(lines: Iterable[Mapping[str, Any]], way: str) -> dict[float, float]:
    """The learning rates that were tried with seed 0, and the last losses."""
    wanted = {"kind": "train", "way": way, "seed": 0}.items()
    return {line["rate"]: line["evaluations"][-1][2] for line in lines if wanted <= line.items()}


def best(tried: Mapping[float, float]) -> float:
    return min(tried, key=lambda rate: tried[rate])


def next_rate(tried: Mapping[float, float]) -> float | None:
    """Half or twice the best rate, if that was not tried."""
    around = (best(tried) / 2, best(tried) * 2)
    return next((rate for rate in around if rate not in tried), None)
