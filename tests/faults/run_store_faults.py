#!/usr/bin/env python3
"""Causes each fault of a store of weights, and counts what came of it.

    tests/faults/run_store_faults.py --results build/faults/store.json
    tests/faults/run_store_faults.py --results build/faults/store.json \\
        --table docs/results/weights.md

--table only writes the table from the results, between the marks of the page. The exit status is 1
if a fault came to something wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from reliability_page import replace_tables
from store_faults import STORE_FAULTS


def run(faults: list[str], results: Path) -> bool:
    """Returns whether all came to what is right."""
    found: dict[str, Mapping[str, int]] = {}
    fine = True
    for fault in STORE_FAULTS:
        if fault.name not in faults:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gradwire-faults-") as folder:
            try:
                found[fault.name] = fault.cause(Path(folder), fault.times)
            except AssertionError as error:
                found[fault.name] = {f"WRONG: {error}": 1}
                fine = False
        print(
            f"{fault.name}: {dict(found[fault.name])} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(found, indent=1) + "\n")
    return fine


def make_table(results: Path) -> str:
    found = json.loads(results.read_text())
    lines = ["| fault | | right is | what came of it |", "| --- | --- | --- | --- |"]
    for fault in STORE_FAULTS:
        counts = found.get(fault.name, {"not run": 0})
        seen = "; ".join(f"{count}: {words}" for words, count in sorted(counts.items()))
        lines.append(f"| {fault.name} | {fault.words} | {fault.right} | {seen} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [fault.name for fault in STORE_FAULTS]
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--faults", nargs="+", default=names, choices=names)
    parser.add_argument("--table", type=Path, help="the page whose table is written")
    given = parser.parse_args()
    if given.table is not None:
        replace_tables(given.table, make_table(given.results))
        return 0
    return 0 if run(given.faults, given.results) else 1


if __name__ == "__main__":
    sys.exit(main())
