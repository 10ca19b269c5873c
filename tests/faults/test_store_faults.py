"""The short form of run_store_faults.py: each fault a few times."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.weights import Subscriber
from run_store_faults import make_table, run
from store_faults import STORE_FAULTS, StoreFault

_TIMES = 10


@pytest.mark.parametrize("fault", STORE_FAULTS, ids=[fault.name for fault in STORE_FAULTS])
def test_a_fault_comes_to_what_is_right(tmp_path: Path, fault: StoreFault) -> None:
    times = fault.times if fault.times <= 20 else _TIMES
    seen = fault.cause(tmp_path, times)
    assert sum(seen.values()) >= times


def test_a_wrong_outcome_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_nothing(self: Subscriber) -> None:
        return None

    results = tmp_path / "store.json"
    monkeypatch.setattr(Subscriber, "fetch", fetch_nothing)
    assert not run(["late-joiner"], results)
    assert "| late-joiner |" in make_table(results)
    assert "WRONG" in make_table(results)
