#!/usr/bin/env python3
"""The table of docs/results/exchanges.md: five exchanges, three bandwidths, three codecs.

    bench/exchanges.py results.json             # about an hour; needs root for the links
    bench/exchanges.py results.json --render    # only the table

Each cell is a run of `gradwire train`. Cells that are already in the file are not run again, so an
interrupted call can be repeated. Runs that measure the time of a step are short. Accuracy and bytes
come from longer runs at 1 Gbit/s: they do not depend on the bandwidth, because a codec makes the
same bytes for every link.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS = {
    "sharded": ["--exchange", "sharded"],
    "ring": ["--exchange", "ring"],
    "server": ["--exchange", "server"],
    "sharded-optimizer": ["--exchange", "sharded-optimizer"],
    "every 4 steps": ["--every", "4"],
}
CODECS = ("raw", "bf16", "3lc:s=1.00,coder=rice")
SHORT = {"10mbit": 16, "100mbit": 24, "1gbit": 24}  # steps
LONG = "1gbit, long"
LEARNING_RATE = "0.025"  # per worker; with the default, 0.1, so few steps do not train the model
Cells = dict[str, dict[str, Any]]  # by key()


def key(way: str, case: str, codec: str) -> str:
    return f"{way} | {case} | {codec}"


def measure(
    way: str, case: str, codecs: list[str], steps: int, workers: int, data_dir: Path | None
) -> Cells:
    """Runs each codec. The seconds are those of the training, without evaluations."""
    bandwidth = case.split(",")[0]
    command = [str(Path(sys.executable).with_name("gradwire")), "train", "--model", "resnet20"]
    command += ["--workers", str(workers), "--bandwidth", bandwidth, "--steps", str(steps)]
    command += [] if data_dir is None else ["--data-dir", str(data_dir)]
    command += ["--eval-every", str(steps), "--lr", LEARNING_RATE, *WAYS[way]]
    for codec in codecs:
        command += ["--codec", codec]
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        subprocess.run([*command, "--json", output.name], check=True)
        report = json.loads(Path(output.name).read_text())
    if report["times"] != "measured":
        sys.exit(f"exchanges: {report['links']['note']}: times would be modelled")
    cells = {}
    for result in report["results"]:
        if not result["replicas_identical"]:
            sys.exit(f"exchanges: {way}, {result['codec']}: replicas differ")
        cells[key(way, case, result["codec"])] = {
            "steps": steps,
            "seconds_a_step": result["measured_seconds"] / steps,
            "bytes_a_step": (result["push_bytes"] + result["pull_bytes"]) / steps,
            "accuracy": result["final"],
            "loss": sum(result["loss"][-20:]) / len(result["loss"][-20:]),
            "commit": report["machine"]["gradwire"]["commit"],
        }
    return cells


def table(cells: Cells) -> list[str]:
    """The table in Markdown: ms per step, and kB that a worker pushes and pulls per step."""
    cases = [*SHORT, LONG]
    head = ["exchange", "codec", *(f"ms per step, {b}" for b in SHORT), "kB per step", "accuracy"]
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for way in WAYS:
        for codec in CODECS:
            *found, last = [cells.get(key(way, case, codec)) for case in cases]
            times = [
                "-" if cell is None else f"{cell['seconds_a_step'] * 1e3:.0f}" for cell in found
            ]
            rest = (
                ["-", "-"]
                if last is None
                else [f"{last['bytes_a_step'] / 1e3:.1f}", f"{last['accuracy']:.1%}"]
            )
            lines.append("| " + " | ".join([way, f"`{codec}`", *times, *rest]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, default=400, help="steps of the long runs")
    parser.add_argument("--data-dir", type=Path, help="the folder with Fashion-MNIST")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--render", action="store_true", help="only print the table of the results")
    arguments = parser.parse_args()
    cells: Cells = {}
    if arguments.results.exists():
        cells = json.loads(arguments.results.read_text())
    runs = {} if arguments.render else {**SHORT, LONG: arguments.steps}
    for case, steps in runs.items():
        for way in WAYS:
            missing = [codec for codec in CODECS if key(way, case, codec) not in cells]
            if missing:
                cells |= measure(way, case, missing, steps, arguments.workers, arguments.data_dir)
                arguments.results.write_text(json.dumps(cells, indent=1) + "\n")
    print("\n".join(table(cells)))


if __name__ == "__main__":
    main()
