"""Trains a model that is trained already a little further, with several ways of local steps.

    python bench/fine_tuning.py pretrain gpt.safetensors
    python bench/fine_tuning.py run gpt.safetensors results.jsonl [--only PULSELoCo]
    python bench/fine_tuning.py table results.jsonl

`pretrain` trains the laboratory's gpt by the recipe of `gradwire train --model gpt --workers 1`.
`run` trains it on, with 4 workers in this process on one core, and adds a line of JSON for each run
as soon as it ends; it leaves out runs that the file has. `table` prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradwire.machine import describe_build, describe_machine
from gradwire.torch import LocalSteps, outer_nesterov, pulse_loco, sparse_loco
from gradwire_lab.evaluate.found import interval
from gradwire_lab.train import data, loop, models, strategies
from gradwire_lab.train.options import from_options
from gradwire_lab.train.schedule import learning_rate
from gradwire_lab.train.settings import ONE_PROCESS, Run, TrainSettings
from gradwire_lab.train.strategy import Strategy

WORKERS, EVERY = 4, 30
RATES = (1e-5, 3e-6, 1e-6)
DILOCO: dict[str, Any] = {"outer": outer_nesterov()}
WAYS: dict[str, dict[str, Any]] = {
    "DiLoCo, `raw`": {"codec": "raw", **DILOCO},
    "DiLoCo, `3lc:s=1.00,coder=rice`": {"codec": "3lc:s=1.00,coder=rice", **DILOCO},
    "`sparse_loco()`": sparse_loco(),
    "`pulse_loco()`": pulse_loco(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("pretrain")
    command.add_argument("file", type=Path)
    command.add_argument("--steps", type=int, default=1000)
    command.set_defaults(run=pretrain)
    command = commands.add_parser("run")
    command.add_argument("file", type=Path)
    command.add_argument("results", type=Path)
    command.add_argument("--steps", type=int, default=120)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--only", default="", help="ways with this in their name")
    command.set_defaults(run=run)
    command = commands.add_parser("table")
    command.add_argument("results", type=Path)
    command.set_defaults(run=lambda arguments: print(table(read(arguments.results))))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.run(arguments)


def settings(**given: Any) -> TrainSettings:
    return from_options({"model": "gpt", "every": 1, "exchange": "sharded", "threads": 1} | given)


def pretrain(arguments: argparse.Namespace) -> None:
    from safetensors.torch import save_file

    chosen = settings(workers=1, steps=arguments.steps, batch=32)
    text = data.load(chosen.data, chosen.data_dir)
    model = models.build("gpt", *text.shape, seed=0, width=chosen.width)
    optimizer = strategies.local_optimizer(model, chosen)
    batches = text.batches(chosen.batch, 1, 0, chosen.seed)
    for step in range(chosen.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(chosen, step)
        inputs, targets = map(torch.from_numpy, batches.at(step))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), chosen.clip)
        optimizer.step()
    save_file(model.state_dict(), arguments.file, metadata={"data": text.describe()})


def run(arguments: argparse.Namespace) -> None:
    there = {(r["way"], r["rate"], r["seed"]) for r in read(arguments.results)}
    for seed in range(arguments.seeds):
        for rate in RATES:
            for way in (way for way in WAYS if arguments.only in way):
                if (way, rate, seed) not in there:
                    result = train(way, rate, seed, arguments)
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(result) + "\n")


def train(way: str, rate: float, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = settings(
        exchange=ONE_PROCESS,
        every=EVERY,
        workers=WORKERS,
        compress="updates",
        steps=arguments.steps,
        seed=seed,
        learning_rate=rate,
        schedule="constant",
        warmup=0,
        codecs=["raw"],
        init=arguments.file,
        eval_every=arguments.steps,
    )
    text = data.load(chosen.data, chosen.data_dir)
    trainer = loop.Trainer(chosen, text, 0, None, torch.device("cpu"))
    visible: list[float] = []
    records = trainer.run(Run("raw", seed), lambda event: None, chooser(WAYS[way], visible))
    assert len({record.parameters_digest for record in records}) == 1, "the replicas differ"
    model = trainer._model(chosen)
    start = trainer._value(model, text.test_batches(), 1)
    stats = [record.hook for record in records if record.hook is not None]
    return {
        "way": way,
        "rate": rate,
        "seed": seed,
        "steps": arguments.steps,
        "start": start,
        "losses": [(e.step, e.value) for e in records[0].evaluations],
        "train": [statistics.fmean(filter(None, record.losses[-100:])) for record in records],
        "push_bytes": [s["push_bytes"] for s in stats],
        "pull_bytes": [s["pull_bytes"] for s in stats],
        "visible": visible,
        "values": models.parameter_count(model),
        "seconds": records[0].seconds,
        "machine": describe_machine(),
        "build": describe_build(),
        "load": os.getloadavg()[0],
    }


def chooser(arguments: dict[str, Any], visible: list[float]) -> Callable[..., Strategy]:
    """visible: gets, of rank 0 and each exchange, the share of the values whose rounding to
    bfloat16 has changed since the last exchange."""

    def choose(model: nn.Module, codec: str, chosen: TrainSettings, group: Any) -> Any:
        local = strategies.local_optimizer(model, chosen)
        optimizer = LocalSteps(local, model, every=EVERY, **arguments)

        def look(*_: Any) -> None:
            if optimizer.local_steps % EVERY == EVERY - 1:
                anchors = optimizer.anchors()
                changed = [(anchors[n].bfloat16() != p.bfloat16()) for n, p in named]
                visible.append(float(torch.cat([c.flatten() for c in changed]).float().mean()))

        named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        if optimizer.rank == 0:
            local.register_step_post_hook(look)
        return strategies._Local(model, optimizer)

    return choose


def read(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def table(results: list[dict[str, Any]]) -> str:
    rows = [
        "| rate | way | loss | less than at the start | against DiLoCo | sent by a rank | fewer |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rate in RATES:
        of_rate = [r for r in results if r["rate"] == rate]
        base = {r["seed"]: r for r in of_rate if r["way"] == next(iter(WAYS))}
        for way in WAYS:
            mine = [r for r in of_rate if r["way"] == way]
            if len(mine) < 2:
                continue
            loss, half = interval([end(r) for r in mine])
            gained = statistics.fmean(r["start"] - end(r) for r in mine)
            worse, of_worse = interval([end(r) - end(base[r["seed"]]) for r in mine])
            against = f"{worse:+.5f} ± {of_worse:.5f}" if way != next(iter(WAYS)) else ""
            bytes_ = statistics.fmean(map(sent, mine))
            fewer = statistics.fmean(sent(base[r["seed"]]) for r in mine) / bytes_
            rows.append(
                f"| {rate:g} | {way} | {loss:.5f} ± {half:.5f} | {gained:.5f} | {against} "
                f"| {bytes_ / 1e6:.3f} MB | {fewer:.1f} |"
            )
    for rate in RATES:
        for way in WAYS:
            shares = [
                s for r in results if (r["rate"], r["way"]) == (rate, way) for s in r["visible"]
            ]
            if shares:
                rows.append(
                    f"\nvisible at {rate:g} with {way}: mean {statistics.fmean(shares):.2%}, from "
                    f"{min(shares):.2%} to {max(shares):.2%}"
                )
    return "\n".join(rows)


def end(result: dict[str, Any]) -> float:
    return result["losses"][-1][1]


def sent(result: dict[str, Any]) -> float:
    """Bytes of an average rank."""
    return statistics.fmean(map(sum, zip(result["push_bytes"], result["pull_bytes"], strict=True)))


if __name__ == "__main__":
    main()
