#!/usr/bin/env python3
"""Repeats 3LC's experiment with ten workers: the accuracy and the traffic of each design.

    bench/ten_workers.py results                        # ResNet-110, 25,600 steps, 3 seeds each
    bench/ten_workers.py results --model resnet20 --steps 400 --seeds 2 --data-dir fashion-mnist
    bench/ten_workers.py results --render               # the table of the finished runs

Each run is one of `gradwire train --exchange one-process`. The setting is that of 3LC, section 4.3:
SGD with momentum 0.9 and weight decay 1e-4, a learning rate from 0.1 to 0.001 along a cosine, times
the number of workers, 32 images per worker and step; batch normalisation and biases go raw.

Each finished run leaves a file in the folder and is not repeated. So an interrupted call can be
started again, and several calls with different designs may share the folder. summary.json and
table.md hold the results so far.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire.train import run, settings
from gradwire.train.errors import TrainError
from gradwire.train.settings import SettingsError, TrainSettings


@dataclass(frozen=True)
class Design:
    """A design that is compared. title: its name in 3LC; accuracy, difference: from 3LC's Table 1,
    in percent; ratio: from its Table 2. None: the table does not have it."""

    title: str
    codec: str
    every: int = 1
    accuracy: float | None = None
    difference: float | None = None
    ratio: float | None = None


DESIGNS = {
    "raw": Design("32-bit float", "raw", 1, 93.37),
    "int8": Design("8-bit int", "int8", 1, 93.33, -0.04),
    "stoch3": Design("Stoch 3-value b-3-5", "stoch3:coder=none", 1, 92.06, -1.31),
    "onebit": Design("MQE 1-bit int", "onebit", 1, 93.21, -0.16),
    "topk-25": Design("25% sparsification", "topk:ratio=0.25,index=bitmap"),
    "topk-5": Design("5% sparsification", "topk:ratio=0.05,index=bitmap", 1, 92.87, -0.50),
    "local-2": Design("2 local steps", "raw", 2, 93.03, -0.34),
    "3lc-1.00": Design("3LC (s=1.00)", "3lc:s=1.00,coder=zre", 1, 93.32, -0.05, 39.4),
    "3lc-1.50": Design("3LC (s=1.50)", "3lc:s=1.50,coder=zre", 1, 93.29, -0.08, 70.9),
    "3lc-1.75": Design("3LC (s=1.75)", "3lc:s=1.75,coder=zre", 1, 93.51, 0.14, 107.0),
    "3lc-1.90": Design("3LC (s=1.90)", "3lc:s=1.90,coder=zre", 1, 93.10, -0.27, 160.0),
}
SOURCE = (
    "3LC: Lim, Andersen, Kaminsky, SysML 2019. Accuracy and difference: Table 1; ratio: Table 2. "
    "ResNet-110, CIFAR-10, 10 workers of 32 images, 25,600 steps, mean of 5 runs."
)
BITS = ("push_bits", "pull_bits", "push_payload_bits", "pull_payload_bits")
Run = dict[str, Any]  # the content of a run's file


def write(path: Path, text: str) -> None:
    """Writes the whole file or nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_runs(folder: Path) -> list[Run]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run-*.json"))]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def summarise(runs: list[Run]) -> dict[str, Any]:
    """The results of each design.

    They are the seeds; mean, min and max of accuracy, of bits, and of the difference in accuracy to
    `raw` with the same seed; and the ratio: 64 bits, a value each way, divided by the bits sent.
    """
    summary: dict[str, Any] = {}
    accuracies = {(run["design"], run["seed"]): run["accuracy"] for run in runs}
    for name, design in DESIGNS.items():
        own = [run for run in runs if run["design"] == name]
        if not own:
            continue
        found = {run["seed"]: run["accuracy"] for run in own if run["accuracy"] is not None}
        pairs = [
            accuracy - baseline
            for seed, accuracy in found.items()
            if (baseline := accuracies.get(("raw", seed))) is not None
        ]
        summary[name] = row = {
            **asdict(design),
            "seeds": [run["seed"] for run in own],
            "diverged": [run["seed"] for run in own if run["accuracy"] is None],
            "measured_accuracy": spread(list(found.values())),
            "measured_difference": spread(pairs),
            **{key: spread([run[key] for run in own if key in run]) for key in BITS},
        }
        for bits in ("bits", "payload_bits"):
            push, pull = row[f"push_{bits}"], row[f"pull_{bits}"]
            row[f"ratio_by_{bits}"] = 64 / (push["mean"] + pull["mean"]) if push else None
    return summary


def table(summary: dict[str, Any]) -> list[str]:
    """The table in Markdown: the measured results beside the paper's numbers."""
    lines = [
        "| design | codec | runs | test accuracy | difference to raw | bits pushed, pulled | ratio "
        "| payload bits | payload ratio | 3LC: accuracy | difference | ratio |",
        "| --- | --- |" + " ---: |" * 10,
    ]
    for name, row in summary.items():
        cells = [
            row["title"],
            f"`{row['codec']}`" + (f", every {row['every']} steps" if row["every"] > 1 else ""),
            str(len(row["seeds"])),
            _percent(row["measured_accuracy"], "{:.2f}"),
            "" if name == "raw" else _percent(row["measured_difference"], "{:+.2f}"),
            *(
                cell
                for bits in ("bits", "payload_bits")
                for cell in (
                    ", ".join(_mean(row[f"{leg}_{bits}"]) for leg in ("push", "pull")),
                    _number(row[f"ratio_by_{bits}"], "{:.1f}"),
                )
            ),
            _number(row["accuracy"], "{:.2f} %"),
            _number(row["difference"], "{:+.2f}"),
            _number(row["ratio"], "{:.1f}"),
        ]
        if row["diverged"]:
            cells[3] += f" ({len(row['diverged'])} of {len(row['seeds'])} seeds diverged)"
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _percent(spread_of: dict[str, float] | None, form: str) -> str:
    """`mean % (min to max)`, or only `mean %` if all are equal."""
    if spread_of is None:
        return "-"
    mean, low, high = (form.format(100 * spread_of[key]) for key in ("mean", "min", "max"))
    return f"{mean} %" if low == high else f"{mean} % ({low} to {high})"


def _mean(spread_of: dict[str, float] | None) -> str:
    return "-" if spread_of is None else f"{spread_of['mean']:.3f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def report(folder: Path) -> str:
    """Writes summary.json and table.md; returns the table with its explanation."""
    runs = read_runs(folder)
    summary = summarise(runs)
    lines = table(summary) if summary else ["no finished run"]
    if runs:
        what = runs[0]["settings"]
        seeds = sorted({run["seed"] for run in runs})
        lines += [
            "",
            f"{what['model']} on {what['data']}, {what['workers']} workers of {what['batch']} "
            f"images, {what['steps']} steps, learning rate {what['learning_rate']:g} per worker, "
            f"device {what['device']}, seeds {', '.join(map(str, seeds))}: mean (min to max). Bits "
            "of a value pushed, pulled, and the ratio of 32 to both: whole frames, headers and raw "
            "tensors included. Payload: compressed tensors alone, without headers.",
            "",
            SOURCE,
        ]
    text = "\n".join(lines) + "\n"
    write(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    write(folder / "table.md", text)
    return text


def train(folder: Path, name: str, chosen: TrainSettings) -> None:
    """Runs one training and writes its results to a file of the folder."""
    print(f"{name}, seed {chosen.seed}", file=sys.stderr, flush=True)
    found: Run = {"design": name, "seed": chosen.seed, "accuracy": None}
    found |= {"settings": chosen.to_json(), "command": shlex.join(sys.argv)}
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "report.json"
        run.train_here(chosen, run.Outputs(str(output)), Console(stderr=True, width=120))
        document = json.loads(output.read_text())
    (result,) = document["results"]
    found |= {key: document[key] for key in ("machine", "parameters")}
    found |= {key: result[key] for key in ("seconds", "loss", "diverged")}
    if result["diverged"] is None:
        found |= {"accuracy": result["final"]}
        for leg in ("push", "pull"):
            found[f"{leg}_bits"] = result[f"{leg}_bits_per_value"]
            found[f"{leg}_payload_bits"] = result[f"{leg}_payload_bits"]
    write(folder / f"run-{name}-{chosen.seed}.json", json.dumps(found, indent=1) + "\n")
    report(folder)


def check_same(folder: Path, chosen: TrainSettings) -> None:
    """Ends the program if a run in the folder has other settings: they cannot be compared."""
    own = {"codecs", "every", "seed", "data_dir", "threads"}
    wanted = json.loads(json.dumps(chosen.to_json()))
    for found in read_runs(folder):
        for key, value in wanted.items():
            if key not in own and found["settings"][key] != value:
                sys.exit(
                    f"ten_workers: {folder} holds runs with {key} {found['settings'][key]}, not "
                    f"{value}; take another folder"
                )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the results")
    parser.add_argument("--model", default="resnet110")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--data-dir", type=Path, help="the folder with the data set")
    parser.add_argument("--steps", type=int, default=25600)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.1, help="first learning rate per worker")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:K, for the codecs too")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each design: seeds 0, 1, ...")
    parser.add_argument(
        "--design", choices=DESIGNS, action="append", help="repeatable; default: all"
    )
    parser.add_argument("--render", action="store_true", help="only print the table of the results")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    folder: Path = arguments.folder
    if not arguments.render:
        folder.mkdir(parents=True, exist_ok=True)
        common = TrainSettings(
            exchange=settings.ONE_PROCESS,
            bandwidth=None,
            learning_rate=arguments.lr,
            eval_every=arguments.steps,
            threads=len(os.sched_getaffinity(0)),
            **{
                name: getattr(arguments, name)
                for name in ("model", "data", "data_dir", "steps", "workers", "batch", "device")
            },
        )
        check_same(folder, common)
        try:
            for seed in range(arguments.seeds):
                for name in arguments.design or DESIGNS:
                    if not (folder / f"run-{name}-{seed}.json").exists():
                        design = DESIGNS[name]
                        chosen = replace(
                            common, codecs=(design.codec,), every=design.every, seed=seed
                        )
                        settings.check(chosen)
                        train(folder, name, chosen)
        except (TrainError, SettingsError) as error:
            sys.exit(f"ten_workers: {error}")
    print(report(folder), end="")


if __name__ == "__main__":
    main()
