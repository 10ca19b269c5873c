"""gradwire and what people would take instead: time to a loss, bytes, final loss.

    scripts/rivals.sh                                   makes the environments, runs all, draws
    python bench/time_to_loss.py tune [--way NAME]                 looks for the best learning rate
    python bench/time_to_loss.py train [--way NAME] [--seeds 1]    whole trainings with it
    python bench/time_to_loss.py link [--way NAME] [--bandwidth 10mbit]   a few steps behind links
    python bench/time_to_loss.py whole --way NAME --bandwidth 100mbit     a whole training there
    python bench/time_to_loss.py page                   docs/results/rivals.md and its picture

How many steps a loss takes does not depend on the links, and how long a step takes not on the seed.
So `tune` and `train` train with each way over the loopback, and `link` measures a few steps and
their bytes behind shaped links, 20 ms apart; `page` multiplies. `whole` trains to the target behind
such links, to confirm it. Each adds lines of JSON to docs/results/rivals.jsonl as soon as they are
measured, and leaves out what the file has. Links need root.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gradwire.machine import describe_build, describe_machine
from gradwire_lab.train import network
from gradwire_lab.train.settings import Run, TrainSettings, parse_bandwidth
from ranks import join, run_ranks
from rivals import page
from rivals.results import add, best, next_rate, rates, read
from rivals.ways import EVERY, LATENCY, LINKS, STEPS, WAYS, WORKERS, Way

ROOT = Path(__file__).resolve().parent.parent
_FIRST, _TIMED = 3, 6  # steps that are left out, and those that are timed
_MOST_SECONDS = 900.0  # hivemind sometimes waits for ever behind links
_PLAIN = 2  # steps that PowerSGD leaves to plain DDP at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["tune", "train", "link", "whole", "page", "rank"])
    parser.add_argument("--way", action="append", choices=list(WAYS), default=[])
    parser.add_argument("--bandwidth", action="append", choices=list(LINKS), default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--until", type=float, help="of whole: the loss at which it ends")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "rank":
        run_rank(arguments)
    elif arguments.what == "page":
        page.write(read())
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    for name in arguments.way or list(WAYS):
        for cell in cells(arguments, name):
            key = {"kind": "train" if arguments.what == "tune" else arguments.what, "way": name}
            key |= cell
            if any(key.items() <= line.items() for line in read()):
                continue
            way = WAYS[name]
            try:
                found = measure_cell(arguments, way, key)
            except SystemExit as error:  # the others go on
                print(f"{key}: {error}", flush=True)
                continue
            add({**key, "codec": way.codec, "settings": dict(way.settings), **found})
            print(
                {**key, **{k: v for k, v in found.items() if not isinstance(v, list)}}, flush=True
            )


def cells(arguments: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """What is to be measured of a way. Each one is measured before the next is asked for."""
    if arguments.what in ("link", "whole"):
        yield from ({"bandwidth": link} for link in arguments.bandwidth or LINKS)
        return

    def tried() -> dict[float, float]:
        return rates(read(), name)

    if not tried():
        yield {"rate": WAYS[name].first_rate, "seed": 0}
    while arguments.what == "tune" and tried() and (rate := next_rate(tried())) is not None:
        yield {"rate": rate, "seed": 0}
        if rate not in tried():  # it failed
            return
    if tried():
        yield from ({"rate": best(tried()), "seed": seed} for seed in range(1, arguments.seeds))


def measure_cell(arguments: argparse.Namespace, way: Way, key: dict[str, Any]) -> dict[str, Any]:
    if key["kind"] == "train":
        own = {"seed": key["seed"], "learning_rate": key["rate"]}
        return whole(run(way, way.train_settings(STEPS, EVERY, **own), None))
    rate = parse_bandwidth(key["bandwidth"])
    if key["kind"] == "whole":
        tried = rates(read(), key["way"])
        if not tried:
            raise SystemExit("it has no learning rate yet; `tune` finds one")
        own = {"until": arguments.until, "learning_rate": best(tried)}
        return whole(run(way, way.train_settings(STEPS, EVERY, **own), rate)) | own
    steps = way.whole_periods(_FIRST) + way.whole_periods(_TIMED)
    settings = way.train_settings(steps, steps)
    if way.plain_steps:
        plain = way.codec.replace(f"start={way.plain_steps}", f"start={_PLAIN}")
        settings["codecs"] = (plain,)
    return of_steps(run(way, settings, rate), way)


def run(way: Way, settings: dict[str, Any], rate: int | None) -> list[dict[str, Any]]:
    """What the ranks found."""
    python = sys.executable
    if way.environment:
        python = str(ROOT / "build" / "rivals" / way.environment / "bin" / "python")
    with tempfile.TemporaryDirectory() as folder:

        def command(rank: int) -> list[str]:
            own = ["rank", "--rank", str(rank), "--folder", folder]
            return [*own, "--settings", json.dumps({"adapter": way.adapter, **settings})]

        begin = os.times().elapsed
        run_ranks(
            command, WORKERS, rate, latency=LATENCY, python=python, most_seconds=_MOST_SECONDS
        )
        files = [Path(folder, f"{rank}.json") for rank in range(WORKERS)]
        ranks = [json.loads(file.read_text()) for file in files]
        ranks[0]["wall_seconds"] = os.times().elapsed - begin
    return ranks


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank's part, by the laboratory's training loop."""
    import torch.distributed as dist

    from gradwire_lab.train import data, devices, loop, strategies

    settings = json.loads(arguments.settings)
    adapter = settings.pop("adapter")
    settings = TrainSettings.read(settings)
    interface = network.INTERFACE
    shaped = os.environ["GLOO_SOCKET_IFNAME"] == interface
    marks: list[tuple[float, int]] = []  # after each step: the clock, bytes sent

    def choose(model: Any, codec: str, own: TrainSettings, workers: Any) -> Any:
        make = importlib.import_module(f"rivals.{adapter}").choose if adapter else strategies.choose
        strategy = make(model, codec, own, workers)
        take_step = strategy.take_step

        def take_and_mark(*batch: Any) -> Any:
            loss = take_step(*batch)
            sent = network.read_interface_bytes(interface).sent if shaped else 0
            marks.append((time.perf_counter(), sent))
            return loss

        strategy.take_step = take_and_mark  # type: ignore[method-assign]
        return strategy

    os.environ["RANK"] = str(arguments.rank)
    texts = data.load(settings.data, None)
    device = devices.of_worker("cpu", arguments.rank)
    trainer = loop.Trainer(settings, texts, arguments.rank, interface if shaped else None, device)
    join(arguments.rank, WORKERS)
    (record,) = trainer.run(Run(settings.codecs[0], settings.seed), lambda event: None, choose)
    found = {"marks": marks, **asdict(record)}
    (arguments.folder / f"{arguments.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # not every rival ends its threads


def whole(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a line of the results keeps of a training."""
    first = ranks[0]
    links = [rank["link"]["sent"] for rank in ranks if rank["link"]]
    return {
        "evaluations": [[e["step"], e["seconds"], e["value"]] for e in first["evaluations"]],
        "seconds": first["seconds"],
        "sent_bytes": fmean(links) if links else None,
        "replicas_agree": len({rank["parameters_digest"] for rank in ranks}) == 1,
        **described(),
    }


def of_steps(ranks: Sequence[dict[str, Any]], way: Way) -> dict[str, Any]:
    """Seconds and bytes of a step after the first ones, and the seconds of one that exchanges
    nothing, if there are such steps: the mean of the ranks."""
    first = way.whole_periods(_FIRST)
    spans, alone = [], []
    for rank in ranks:
        marks = rank["marks"][first - 1 :]
        (begin, sent_before), (end, sent) = marks[0], marks[-1]
        steps = len(marks) - 1
        spans.append(((end - begin) / steps, (sent - sent_before) / steps))
        each = [after[0] - before[0] for before, after in pairwise(marks)]
        alone.append(median([s for i, s in enumerate(each, 1) if i % way.period] or [0.0]))
    seconds, sent_bytes = (fmean(each) for each in zip(*spans, strict=True))
    found = {"step_seconds": seconds, "step_bytes": sent_bytes, "steps": steps}
    return found | ({"alone_seconds": fmean(alone)} if way.period > 1 else {}) | described()


def described() -> dict[str, Any]:
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    found = {"machine": describe_machine(), "build": describe_build()}
    return {"load": os.getloadavg()[0], "commit": commit, **found}


if __name__ == "__main__":
    main()
