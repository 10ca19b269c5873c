"""Numbers with units on the command line."""

from __future__ import annotations

import re
from decimal import Decimal

from typer import BadParameter

# B: the billion of model sizes.
_MULTIPLES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_SECONDS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "min": Decimal(60)}
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"


def parse_count(text: str, option: str, most: int | None = None) -> int:
    """`25.6M` -> 25_600_000. Raises BadParameter for what is no whole number from 1 to `most`."""
    match = re.fullmatch(rf"{_NUMBER}([kKMGB]?)", text, re.ASCII)
    number = Decimal(match[1]) * _MULTIPLES[match[2]] if match else Decimal(0)
    if number < 1 or number != int(number) or (most is not None and number > most):
        to = "" if most is None else f" to {most:,}"
        raise BadParameter(
            f"{text} is no number from 1{to}, such as 5000, 200k, 25.6M or 1.5B", param_hint=option
        )
    return int(number)


def parse_seconds(text: str, option: str) -> float:
    """`800ms` -> 0.8. Raises BadParameter."""
    match = re.fullmatch(rf"{_NUMBER} ?(us|ms|s|min)", text, re.ASCII)
    seconds = Decimal(match[1]) * _SECONDS[match[2]] if match else Decimal(0)
    if seconds <= 0:
        raise BadParameter(
            f"{text} is no time above 0 with its unit, such as 800ms, 1.5s or 2min",
            param_hint=option,
        )
    return float(seconds)
