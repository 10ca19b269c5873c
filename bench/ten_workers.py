#!/usr/bin/env python3
"""3LC's experiment: what each design costs in accuracy and sends in bits, with ten workers.

    bench/ten_workers.py results                        # ResNet-110, 25,600 steps, 3 seeds each
    bench/ten_workers.py results --model resnet20 --steps 400 --seeds 2 --data-dir fashion-mnist
    bench/ten_workers.py results --render               # the table of what is there

All workers and their server are simulated in one process on one device (one_process.py). Setting:
3LC, section 4.3: SGD with momentum 0.9 and weight decay 1e-4, learning rate from 0.1 to 0.001 along
a cosine, times the number of workers, 32 images a worker and step; batch normalisation and biases
go raw.

Each finished run is a file of the folder; what is there is not run again, so a call that was broken
off goes on, and several calls may share the folder, each with designs of its own. summary.json and
table.md hold what is there so far.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradwire.machine import describe_build, describe_machine
from gradwire.torch.device_codec import require_kernels
from gradwire.train import data, settings

sys.path.insert(0, str(Path(__file__).parent))
import one_process


@dataclass(frozen=True)
class Design:
    """What is compared. title: 3LC's name; accuracy, difference: from 3LC's Table 1, in percent;
    ratio: from its Table 2. None: not in there."""

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
SECONDS_BETWEEN_LINES = 10.0
Run = dict[str, Any]  # as in its file


class Progress:
    """A line every few seconds."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps
        self._start = self._last = time.monotonic()

    def show(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_LINES and step < self._steps:
            return
        self._last = now
        left = (now - self._start) / step * (self._steps - step)
        print(
            f"{self._name}: step {step} of {self._steps}, loss {loss:.3f}, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def write(path: Path, text: str) -> None:
    """The whole file or nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_runs(folder: Path) -> list[Run]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run-*.json"))]


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def summarise(runs: list[Run]) -> dict[str, Any]:
    """By design: seeds, mean, min and max of accuracy and bits, and of the difference in accuracy
    to `raw` with the same seed; what 64 bits, a value each way, become smaller by."""
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
        summary[name] = {
            **asdict(design),
            "seeds": [run["seed"] for run in own],
            "diverged": [run["seed"] for run in own if run["accuracy"] is None],
            "measured_accuracy": spread(list(found.values())) if found else None,
            "measured_difference": spread(pairs) if pairs else None,
            **{key: spread([run[key] for run in own]) for key in BITS},
        }
        row = summary[name]
        for bits in ("bits", "payload_bits"):
            both = row[f"push_{bits}"]["mean"] + row[f"pull_{bits}"]["mean"]
            row[f"ratio_by_{bits}"] = 64 / both
    return summary


def table(summary: dict[str, Any]) -> list[str]:
    """Markdown: what was measured beside the paper's numbers."""
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
                    f"{row[f'push_{bits}']['mean']:.3f}, {row[f'pull_{bits}']['mean']:.3f}",
                    f"{row[f'ratio_by_{bits}']:.1f}",
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
    """`mean % (min to max)`; without brackets where all are equal."""
    if spread_of is None:
        return "-"
    mean, low, high = (form.format(100 * spread_of[key]) for key in ("mean", "min", "max"))
    return f"{mean} %" if low == high else f"{mean} % ({low} to {high})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def report(folder: Path) -> str:
    """Writes summary.json and table.md; returns the table and what one has to know besides."""
    runs = read_runs(folder)
    summary = summarise(runs)
    lines = table(summary) if summary else ["no finished run"]
    if runs:
        what = runs[0]["setting"]
        seeds = sorted({run["seed"] for run in runs})
        lines += [
            "",
            f"{what['model']} on {runs[0]['data']}, {what['workers']} workers of {what['batch']} "
            f"images, {what['steps']} steps, learning rate {what['learning_rate']:g} a worker, "
            f"device {what['device']}, seeds {', '.join(map(str, seeds))}: mean (min to max). Bits "
            "of a value pushed, pulled, and the ratio of both to 32: whole frames, headers and raw "
            "tensors included. Payload: compressed tensors alone, without headers.",
            "",
            SOURCE,
        ]
    text = "\n".join(lines) + "\n"
    write(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    write(folder / "table.md", text)
    return text


def check_same(folder: Path, kind: dict[str, Any]) -> None:
    """Ends the program if a run in the folder is of another kind: they cannot be compared."""
    for run in read_runs(folder):
        different = [key for key, value in kind.items() if run[key] != value]
        if different:
            key = different[0]
            sys.exit(
                f"ten_workers: {folder} holds runs with {key} {run[key]}, not {kind[key]}; "
                "take another folder"
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where results are and go")
    parser.add_argument("--model", choices=settings.MODELS, default="resnet110")
    parser.add_argument("--data", choices=settings.DATA, default="fashion-mnist")
    parser.add_argument("--data-dir", type=Path, help="where the data set is")
    parser.add_argument("--steps", type=int, default=25600)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images of a worker in a step")
    parser.add_argument("--lr", type=float, default=0.1, help="first learning rate of a worker")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:K, for the codecs too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="PyTorch's")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each design: seeds 0, 1, ...")
    parser.add_argument(
        "--design", choices=DESIGNS, action="append", help="repeatable; default: all"
    )
    parser.add_argument("--render", action="store_true", help="the table of what is there, no run")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: this PyTorch finds no GPU it can use")
    if arguments.device != "cpu":
        try:
            require_kernels(torch.device(arguments.device))
        except RuntimeError as error:
            parser.error(str(error))
    for option in ("steps", "workers", "batch", "threads", "seeds"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option} must be at least 1")
    if arguments.steps % 2 and "local-2" in (arguments.design or DESIGNS):
        parser.error(f"--steps {arguments.steps}: local-2 takes an even number")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    folder: Path = arguments.folder
    if arguments.render:
        print(report(folder), end="")
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    try:
        images = data.load(arguments.data, arguments.data_dir)
    except data.DataError as error:
        sys.exit(f"ten_workers: {error}")
    setting = one_process.Setting(
        arguments.model,
        arguments.steps,
        arguments.workers,
        arguments.batch,
        arguments.lr,
        arguments.device,
    )
    kind = {"setting": asdict(setting), "data": arguments.data}
    check_same(folder, kind)
    where = {
        "command": shlex.join(["bench/ten_workers.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "gradwire": describe_build(),
        "torch": torch.__version__,
    }
    if arguments.device != "cpu":
        where["gpu"] = torch.cuda.get_device_name(arguments.device)
    for seed in range(arguments.seeds):
        for name in arguments.design or DESIGNS:
            path = folder / f"run-{name}-{seed}.json"
            if path.exists():
                continue
            design = DESIGNS[name]
            progress = Progress(f"{name}, seed {seed}", arguments.steps)
            start = time.monotonic()
            outcome = one_process.train(
                setting, images, design.codec, design.every, seed, progress.show
            )
            run = {"design": name, "seed": seed, **asdict(outcome), **kind}
            run |= {"seconds": time.monotonic() - start, **where}
            write(path, json.dumps(run, indent=1) + "\n")
            report(folder)
    print(report(folder), end="")


if __name__ == "__main__":
    main()
