"""The time of a step with dedicated servers that exchange step by step, and tensor by tensor.

    python bench/barriers.py [--model resnet20] [--batch 32] [--steps 20] [--rounds 3]
                             [--codec raw] [--bandwidth 100mbit] [--json barriers.json]
                             [--picture barriers.png]

Runs `gradwire train --exchange server` with 4 workers and a server on this machine, each behind a
link of its own, in turns with both barriers, so that both see the same noise. --codec and
--bandwidth can be repeated. A time is the median over the rounds. --picture draws what worker 0 did
with each part of the model in one step, for the first codec and bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BARRIERS = ("step", "tensor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", action="append", dest="codecs")
    parser.add_argument("--bandwidth", action="append", dest="bandwidths")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--picture", type=Path, help="draw a step there (PNG)")
    arguments = parser.parse_args()
    rows = []
    for bandwidth in arguments.bandwidths or ["100mbit", "1gbit"]:
        for codec in arguments.codecs or ["raw", "3lc:s=1.00,coder=rice"]:
            rows.append(measure(arguments, codec, bandwidth))
            print(in_words(rows[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.picture is not None:
        draw(rows[0], arguments.picture)


def measure(arguments: argparse.Namespace, codec: str, bandwidth: str) -> dict[str, Any]:
    """Step times of both barriers, and worker 0's timeline of one step."""
    seconds: dict[str, list[float]] = {barrier: [] for barrier in BARRIERS}
    timeline: list[dict[str, Any]] = []
    commit = ""
    for _ in range(arguments.rounds):
        for barrier in BARRIERS:
            report = train(arguments, codec, bandwidth, barrier)
            (result,) = report["results"]
            seconds[barrier].append(result["seconds"] / arguments.steps)
            timeline = result["hook_of_rank"][0]["timeline"] or timeline
            commit = report["machine"]["gradwire"]["commit"]
    return {
        "model": arguments.model,
        "batch": arguments.batch,
        "codec": codec,
        "bandwidth": bandwidth,
        "shaped": report["links"]["shaped"],
        "commit": commit,
        "step_seconds": seconds,
        "timeline": timeline,
    }


def train(
    arguments: argparse.Namespace, codec: str, bandwidth: str, barrier: str
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            *(str(Path(sys.executable).with_name("gradwire")), "train", "--exchange", "server"),
            *("--model", arguments.model, "--batch", str(arguments.batch), "--codec", codec),
            *("--bandwidth", bandwidth, "--barrier", barrier, "--steps", str(arguments.steps)),
            *("--eval-every", str(arguments.steps), "--json", str(path)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(path.read_text())
        return report


def in_words(row: dict[str, Any]) -> str:
    step, tensor = (statistics.median(row["step_seconds"][barrier]) for barrier in BARRIERS)
    loopback = "" if row["shaped"] else " (loopback: the links could not be shaped)"
    return (
        f"{row['model']}, {row['codec']}, {row['bandwidth']}{loopback}: "
        f"{step:.3f} s a step, tensor by tensor {tensor:.3f} s ({tensor / step:.2f})"
    )


def draw(row: dict[str, Any], path: Path) -> None:
    """A line for each part: its push, its way through the server, and where it was needed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for place, part in enumerate(row["timeline"]):
        axes.plot([part["ready"], part["pushed"]], [place, place], color="tab:blue", linewidth=3)
        if part["arrived"] is not None:
            axes.plot([part["pushed"], part["arrived"]], [place, place], color="lightgray")
            axes.plot(part["arrived"], place, "|", color="tab:green")
        if part["needed"] is not None:
            axes.plot(part["needed"], place, ".", color="tab:orange")
    for style, label in (
        ({"color": "tab:blue", "linewidth": 3}, "encoded and handed over"),
        ({"color": "lightgray"}, "under way: push, server, pull"),
        ({"color": "tab:green", "marker": "|", "linestyle": ""}, "the pull has arrived"),
        ({"color": "tab:orange", "marker": ".", "linestyle": ""}, "the forward pass needs it"),
    ):
        axes.plot([], [], label=label, **style)
    axes.set_xlabel("seconds since the first gradient of the step")
    axes.set_ylabel("parts of the model, in the order of their pushes")
    axes.set_title(f"{row['model']}, {row['codec']}, {row['bandwidth']}: one step of worker 0")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
