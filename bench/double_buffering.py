#!/usr/bin/env python3
"""Prints how much time `mpi_training --buffers 2` saves (QSGD, section 5: double buffering).

    bench/double_buffering.py build/release/examples/mpi_training --rate 100M --ranks 2 4

In each round every codec trains with one buffer and with two, one after the other, so that other
programs on the machine slow both alike. The table has the medians of the milliseconds a step, and
the median, lowest and highest ratio of a round: above 1, two buffers are faster.

--rate unshaped: over MPI's shared memory; else each rank is behind a link of its own, which needs
root (bench/perftest_over_links.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

_OVER_LINKS = Path(__file__).with_name("perftest_over_links.py")


def step_milliseconds(program: Path, rate: str, ranks: int, options: list[str]) -> float:
    """Runs one training. Raises SystemExit with its output if it fails or replicas differ."""
    command = [sys.executable, str(_OVER_LINKS), str(program), "--rate", rate]
    command += ["--ranks", str(ranks), "--", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^([\d.]+) ms a step$", done.stdout, re.MULTILINE)
    if done.returncode or found is None or "replicas equal" not in done.stdout:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return float(found[1])


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path, help="mpi_training")
    parser.add_argument("--rate", default="100M", help="10M, 100M, unshaped")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--codec", nargs="+", default=["raw", "qsgd:bits=4", "3lc:s=1,coder=rice"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print("| link | ranks | codec | 1 buffer, ms | 2 buffers, ms | times as fast |")
    print("| --- | ---: | --- | ---: | ---: | ---: |")
    for ranks in given.ranks:
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(given.rounds):
            for codec in given.codec:
                for buffers in (1, 2):
                    options = ["--codec", codec, "--buffers", str(buffers)]
                    options += ["--steps", str(given.steps), "--batch", str(given.batch)]
                    taken = step_milliseconds(given.program, given.rate, ranks, options)
                    times.setdefault((codec, buffers), []).append(taken)
        for codec in given.codec:
            one, two = times[codec, 1], times[codec, 2]
            ratios = sorted(a / b for a, b in zip(one, two, strict=True))
            print(
                f"| {given.rate} | {ranks} | `{codec}` | {median(one):.1f} | {median(two):.1f} "
                f"| {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
