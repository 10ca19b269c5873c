"""The estimate before a run: bits a value of each codec, and seconds."""

from __future__ import annotations

import pytest

from gradwire_lab.train.estimate import estimate_seconds, typical_bits_per_value
from gradwire_lab.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("codec", "low", "high"),
    [
        ("raw", 32, 32.1),
        ("raw/int8", 20, 20.1),
        ("auto:bits=3.5", 2.5, 3.5),
        ("auto:bits=3.5/raw", 17, 18),
        ("auto:error=0.3", 1.5, 5),
    ],
)
def test_bits_of_a_value(codec: str, low: float, high: float) -> None:
    assert low <= typical_bits_per_value(codec) <= high


def test_seconds_on_a_link() -> None:
    settings = TrainSettings(codecs=("raw", "auto:bits=2"), workers=2, bandwidth=1_000_000, steps=4)
    seconds = estimate_seconds(settings, parameters=1000, step_seconds=0.5, evaluation_seconds=1.0)
    assert seconds["raw"] == pytest.approx(4 * (0.5 + 0.032) + 1.0, rel=0.01)
    assert 4 * 0.5 + 1.0 < seconds["auto:bits=2"] < 4 * (0.5 + 0.0021) + 1.0
