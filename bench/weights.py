#!/usr/bin/env python3
"""Measures how a trainer's weights reach three receivers behind slow links.

    bench/weights.py run build/weights.jsonl [--rates 100mbit 1gbit] [--lrs 1e-6 1e-5]
    bench/weights.py table build/weights.jsonl
    bench/weights.py picture build/weights.jsonl docs/pictures/weights.svg

A trainer and three receivers are processes in network namespaces, each behind a link of its own, so
`run` needs root, and the packages zstandard, fsspec and aiohttp. The trainer takes steps of AdamW
on 100 M float32 weights; receivers have them in bfloat16. Weights begin as N(0, 0.02). The gradient
of a weight is a number drawn once, which pulls it, plus another of the same size drawn at each
step, which is noise; ten steps go before the first version. All ways but the broadcast write files
to a folder of the trainer, which `python -m http.server` gives to the receivers; these ask for a
new version every 20 ms. The time of a version counts from the end of the optimizer's step until the
last receiver has the version in use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gradwire_lab.train import network
from gradwire_lab.train.settings import parse_bandwidth
from ranks import join, run_ranks

if TYPE_CHECKING:
    from weight_ways import Way

Tensors = dict[str, Any]
RECEIVERS = 3
_PORT = 8000
_WARM_UP = 10
_POLL_SECONDS = 0.02
_WIDTH, _LAYERS, _VOCABULARY = 768, 12, 20_000
_NAMES = ["gradwire", "xor", "full", "broadcast"]  # of weight_ways.py


def shapes() -> dict[str, tuple[int, ...]]:
    """Those of a transformer of 100.3 M weights."""
    found: dict[str, tuple[int, ...]] = {"embedding": (_VOCABULARY, _WIDTH)}
    for layer in range(_LAYERS):
        found[f"{layer}.qkv"] = (3 * _WIDTH, _WIDTH)
        found[f"{layer}.out"] = (_WIDTH, _WIDTH)
        found[f"{layer}.up"] = (4 * _WIDTH, _WIDTH)
        found[f"{layer}.down"] = (_WIDTH, 4 * _WIDTH)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("results", type=Path, help="a line of JSON for each version is added")
    run.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    run.add_argument("--lrs", nargs="+", type=float, default=[1e-6, 1e-5])
    run.add_argument("--ways", nargs="+", default=_NAMES, choices=_NAMES)
    run.add_argument("--versions", type=int, default=9, help="of each way, and a third if full")
    run.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    for name in ("table", "picture"):
        shown = commands.add_parser(name)
        shown.add_argument("results", type=Path)
        if name == "picture":
            shown.add_argument("picture", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(make_table(read_rows(given.results)))
    elif given.command == "picture":
        draw(read_rows(given.results), given.picture)
    elif given.rank is not None:
        run_rank(given)
    else:
        for rate in given.rates:
            for lr in given.lrs:
                one = ["--rates", rate, "--lrs", str(lr), "--versions", str(given.versions)]
                ways = [
                    way for way in given.ways if lr == given.lrs[0] or way in ("gradwire", "xor")
                ]
                one += ["--ways", *ways]
                run_ranks(
                    lambda rank, one=one: [  # type: ignore[misc]
                        "run",
                        str(given.results),
                        *one,
                        "--rank",
                        str(rank),
                    ],
                    1 + RECEIVERS,
                    parse_bandwidth(rate),
                )


def run_rank(given: argparse.Namespace) -> None:
    import torch.distributed as dist

    from weight_ways import WAYS

    join(given.rank, 1 + RECEIVERS)
    step = make_trainer(given.lrs[0]) if given.rank == 0 else None
    with serving() if step else no_folder() as folder:
        for name in given.ways:
            way = WAYS[name]
            count = given.versions if way.depends_on_lr else max(given.versions // 3, 1)
            if step is None:
                receive_versions(way, f"http://{network.address(0)}:{_PORT}/{name}", count)
                continue
            for row in send_versions(way, folder / name, count, step):
                row = {"rate": given.rates[0], "lr": given.lrs[0], "way": name} | row
                with given.results.open("a") as results:
                    results.write(json.dumps(row) + "\n")
                print(row, flush=True)
    dist.destroy_process_group()


def send_versions(
    way: Way, place: Path, count: int, step: Callable[[], Tensors]
) -> Iterator[dict[str, float]]:
    """The trainer's part: yields the figures of each version after the first."""
    place.mkdir()
    send, weights = way.sender(place), step()
    measure(partial(send, weights))
    for _ in range(count):
        before = rounded(weights)
        weights = step()
        changed = share_changed(before, rounded(weights))
        del before
        yield summarize(measure(partial(send, weights)), changed)
    check_alike(weights)
    shutil.rmtree(place)


def receive_versions(way: Way, url: str, count: int) -> None:
    import torch

    model = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes().items()}
    receive = way.receiver(url, model)

    def wait_for_version() -> float:
        while (pause := receive()) is None:
            time.sleep(_POLL_SECONDS)
        return pause

    for _ in range(1 + count):
        measure(wait_for_version)
    check_alike(model)


def measure(work: Callable[[], float | None]) -> list[list[float]]:
    """All ranks begin their work together; it returns the pause. Returns of each rank when it began
    and ended (monotonic seconds), the pause (seconds), and the bytes sent and received."""
    import torch
    import torch.distributed as dist

    counted = network.read_interface_bytes(network.INTERFACE)
    dist.barrier()
    began = time.monotonic()
    pause = work() or 0.0
    ended = time.monotonic()
    now = network.read_interface_bytes(network.INTERFACE)
    mine = [began, ended, pause, now.sent - counted.sent, now.received - counted.received]
    seen = [torch.zeros(5, dtype=torch.float64) for _ in range(1 + RECEIVERS)]
    dist.all_gather(seen, torch.tensor(mine, dtype=torch.float64))
    found: list[list[float]] = torch.stack(seen).tolist()
    return found


def rounded(weights: Tensors) -> Tensors:
    import torch

    return {key: values.to(torch.bfloat16) for key, values in weights.items()}


def share_changed(before: Tensors, after: Tensors) -> float:
    same = sum(int((values == before[key]).sum()) for key, values in after.items())
    return 1 - same / sum(values.numel() for values in after.values())


def summarize(seen: list[list[float]], changed: float) -> dict[str, float]:
    """The trainer's and the receivers' [began, ended, pause, sent, received]."""
    trainer, *receivers = seen
    return {
        "seconds": max(r[1] for r in receivers) - trainer[0],
        "sending": trainer[1] - trainer[0],
        "pause": max(r[2] for r in receivers),
        "received": sum(r[4] for r in receivers) / RECEIVERS,
        "changed": changed,
    }


def make_trainer(lr: float) -> Callable[[], Tensors]:
    """A step of training, which returns the weights."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(shape).normal_(0, 0.02, generator=drawn)
        for name, shape in shapes().items()
    }
    for values in weights.values():
        values.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.0, fused=True)

    def step() -> Tensors:
        pull = torch.Generator().manual_seed(1)
        for values in weights.values():
            if values.grad is None:
                values.grad = torch.empty_like(values)
            values.grad.normal_(generator=pull)
            values.grad += torch.empty_like(values).normal_(generator=drawn)
        optimizer.step()
        return {name: values.detach() for name, values in weights.items()}

    for _ in range(_WARM_UP):
        step()
    return step


@contextmanager
def serving() -> Iterator[Path]:
    """A folder that the receivers can read."""
    with tempfile.TemporaryDirectory(prefix="gradwire-") as name:
        command = [sys.executable, "-m", "http.server", str(_PORT), "--directory", name]
        command += ["--protocol", "HTTP/1.1"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as it:
            try:
                for _ in range(100):
                    try:
                        socket.create_connection((network.address(0), _PORT)).close()
                        break
                    except ConnectionRefusedError:
                        time.sleep(0.1)
                yield Path(name)
            finally:
                it.terminate()


@contextmanager
def no_folder() -> Iterator[Path]:
    yield Path()


def check_alike(own: Tensors) -> None:
    """Raises RuntimeError unless all ranks have the same bits in bfloat16."""
    import torch
    import torch.distributed as dist

    digest = hashlib.sha256()
    for values in rounded(own).values():
        digest.update(values.view(torch.uint8).numpy())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    seen = [torch.empty_like(mine) for _ in range(1 + RECEIVERS)]
    dist.all_gather(seen, mine)
    if any(not torch.equal(one, mine) for one in seen):
        raise RuntimeError("a receiver has other weights than the trainer")


def read_rows(results: Path) -> list[dict[str, Any]]:
    """The medians of each way, link and learning rate."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        groups.setdefault((row["rate"], row["way"], row["lr"]), []).append(row)
    return [
        {"rate": rate, "way": way, "lr": lr, "versions": len(rows)}
        | {
            key: median(row[key] for row in rows)
            for key in rows[0]
            if key not in ("rate", "way", "lr")
        }
        for (rate, way, lr), rows in groups.items()
    ]


def make_table(rows: list[dict[str, Any]]) -> str:
    from weight_ways import WAYS

    lines = [
        "| link | way | Adam's step | changed | received, MB | until in use, s | pause, s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        way = WAYS[row["way"]]
        lr = f"{row['lr']:.0e}".replace("e-0", "e-") if way.depends_on_lr else "any"
        changed = f"{row['changed']:.1%}" if way.depends_on_lr else ""
        figures = f"{row['received'] / 1e6:.3g} | {row['seconds']:.3g} | {row['pause']:.2g}"
        lines.append(f"| {row['rate']} | {way.title} | {lr} | {changed} | {figures} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Until a version is in use, at the first rate and learning rate of the results."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    from weight_ways import WAYS

    shown = [row for row in rows if (row["rate"], row["lr"]) == (rows[0]["rate"], rows[0]["lr"])]
    shown.sort(key=lambda row: -row["seconds"])
    pyplot.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "gradwire", "font.size": 11}
    figure, axes = pyplot.subplots(figsize=(7.6, 2.3), layout="constrained")
    names = [WAYS[row["way"]].title for row in shown]
    colors = ["#0b7285" if row["way"] == "gradwire" else "#adb5bd" for row in shown]
    bars = axes.barh(names, [row["seconds"] for row in shown], color=colors, height=0.62)
    texts = [f"{row['seconds']:.2g} s, {row['received'] / 1e6:.2g} MB each" for row in shown]
    axes.bar_label(bars, texts, padding=5)
    axes.set_title(
        "From a trainer's step until three receivers use the new weights\n"
        "100 M weights in bfloat16, a link of 100 Mbit/s each, Adam at 1e-6",
        loc="left",
        fontsize=11,
    )
    axes.set_xlim(0, 1.35 * max(row["seconds"] for row in shown))
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
