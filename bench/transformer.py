"""examples/transformer.py behind slow links, and the README's table from what was measured.

    python bench/transformer.py run docs/results/transformer.jsonl [--bandwidth 50mbit]
    python bench/transformer.py table docs/results/transformer.jsonl

`run` trains with 4 ranks, each behind a link of its own, which needs root; it adds a line of JSON
for each way as soon as its training ends, and leaves out the ways that the file has already. The
processes share one core. Bytes are those that rank 0's link counted, headers of the network
included. `table` prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradwire.machine import describe_build, describe_machine
from gradwire_lab.train import network
from gradwire_lab.train.settings import parse_bandwidth
from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "transformer.py"
RANKS = 4
WAYS = {
    "plain DDP": ["--codec", "ddp"],
    'above, with `codec="raw"`': ["--codec", "raw"],
    "above": ["--codec", "3lc:s=1.00,coder=rice"],
    "above, with `every=4`": ["--codec", "3lc:s=1.00,coder=rice", "--every", "4"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "table", "rank"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--bandwidth", default="50mbit")
    parser.add_argument("--steps", default="300")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "rank":
        arguments.results.write_text(json.dumps(train(arguments)))
    elif arguments.what == "table":
        print(table(read(arguments.results)))
    else:
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    if reason := network.why_not_shaped():
        raise SystemExit(f"the links cannot be shaped: {reason}")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    there = {result["way"] for result in read(arguments.results)}
    for way in WAYS:
        if way in there:
            continue
        result: dict[str, Any] = {"way": way, "options": WAYS[way], "steps": int(arguments.steps)}
        result |= {"ranks": RANKS, "bandwidth": arguments.bandwidth, "load": [os.getloadavg()[0]]}
        with tempfile.TemporaryDirectory() as folder:

            def command(rank: int, way: str = way, folder: str = folder) -> list[str]:
                own = ["rank", f"{folder}/{rank}.json", "--rank", str(rank), "--way", way]
                return [*own, "--steps", arguments.steps]

            run_ranks(command, RANKS, parse_bandwidth(arguments.bandwidth))
            result |= json.loads(Path(folder, "0.json").read_text())
        result["load"].append(os.getloadavg()[0])
        result |= {"nice": os.nice(0), "machine": describe_machine(), "build": describe_build()}
        with arguments.results.open("a") as file:
            file.write(json.dumps(result) + "\n")


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank's part: the example, run as it is."""
    import torch

    torch.set_num_threads(1)
    sys.stdin.read()  # until the links are there
    os.environ |= {"RANK": str(arguments.rank), "WORLD_SIZE": str(RANKS)}
    sys.argv = [str(EXAMPLE), *WAYS[arguments.way], "--steps", arguments.steps]
    ended = runpy.run_path(str(EXAMPLE), run_name="__main__")
    sent = network.read_interface_bytes(network.INTERFACE).sent
    text = hashlib.sha256(
        ended["train"].numpy().tobytes() + ended["test"].numpy().tobytes()
    ).hexdigest()[:16]
    values = sum(parameter.numel() for parameter in ended["model"].parameters())
    found = {"loss": ended["held_out"], "seconds": ended["seconds"], "sent_bytes": sent}
    return found | {"values": values, "text_sha256": text, "torch": torch.__version__}


def read(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def table(results: list[dict[str, Any]]) -> str:
    """A row for each way, in the order of WAYS."""
    by_way = {result["way"]: result for result in results}
    base = by_way["plain DDP"]
    first = by_way["above"]
    rows = [
        f"| {first['steps']} steps, {first['ranks']} ranks, {first['bandwidth'][:-4]} Mbit/s "
        "| sent by a rank | time | loss on held-out text |",
        "| --- | ---: | ---: | ---: |",
    ]
    for way in [way for way in WAYS if way in by_way]:
        result = by_way[way]
        fewer = base["sent_bytes"] / result["sent_bytes"]
        share = f" (1/{fewer:.0f})" if fewer > 1.5 else ""
        rows.append(
            f"| {way} | {result['sent_bytes'] / 1e6:,.0f} MB{share} | {result['seconds']:.0f} s "
            f"| {result['loss']:.3f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
