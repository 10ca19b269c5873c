#!/usr/bin/env python3
"""Compares predicted and simulated steps with measured steps behind shaped links.

    bench/planning.py results [--model lenet] [--workers 2 --workers 4] [--bandwidth 10mbit]
    bench/planning.py results --render

Workers in network namespaces, each behind a rate-limited link, train one model in several ways, in
blocks of steps that take turns. One of them, `alone`, is DDP that exchanges nothing, and gives the
profile. So the profile sees the same contention as the others: all workers share the cores of this
machine, with whatever else runs there. A step lasts from a barrier of all workers to the end of the
last worker's step; figures are medians. Each combination leaves a file in the folder and is not
repeated.

The bytes of gradwire's codecs are compared with a simulation that gets the recorded gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gradwire.machine import describe_build, describe_machine
from gradwire.plan.cluster import Cluster
from gradwire.plan.measure import TransportMeter, measure_codec
from gradwire.plan.predict import DDP, Bucket, cut_buckets, predict
from gradwire.plan.profile import CodecSpeed, Layer, Profile, Transport
from gradwire.plan.simulate import simulate
from gradwire.train import network
from gradwire.train.options import from_options
from gradwire.train.settings import SHARDED, TrainSettings, parse_bandwidth
from ranks import join, run_ranks

ALONE = "alone"
CODECS = ("raw", "bf16", "3lc:s=1,coder=rice")
WAYS = (ALONE, DDP, *CODECS)
BLOCK = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", default=None)
    parser.add_argument("--workers", action="append", type=int, default=None)
    parser.add_argument("--bandwidth", action="append", default=None)
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind")
    parser.add_argument("--render", action="store_true", help="only print the table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.render:
        if reason := network.why_not_shaped():
            raise SystemExit(f"the links cannot be shaped: {reason}")
        for model, workers, bandwidth in product(
            arguments.model or ("lenet", "resnet20"),
            arguments.workers or (2, 4, 8),
            arguments.bandwidth or ("10mbit", "100mbit", "1gbit"),
        ):
            file = arguments.folder / f"{model}-{workers}-{bandwidth}.json"
            if not file.exists():
                document = check(model, workers, bandwidth, arguments.rounds)
                file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                print(f"wrote {file}", flush=True)
    render(arguments.folder)


def settings_of(model: str, workers: int) -> TrainSettings:
    options = {"model": model, "workers": workers, "steps": 1000, "exchange": SHARDED, "every": 1}
    return from_options(options | {"start_iter": 1})


# The processes


def check(model: str, workers: int, bandwidth: str, rounds: int) -> dict[str, Any]:
    """Measures one combination, and predicts it."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.pickle" for rank in range(workers)]
        arguments = ["--model", model, "--workers", str(workers), "--rounds", str(rounds)]

        def command(rank: int) -> list[str]:
            return [folder, *arguments, "--rank", str(rank), "--result", str(results[rank])]

        rate = parse_bandwidth(bandwidth)
        assert rate is not None
        run_ranks(command, workers, rate)
        measured = [pickle.loads(result.read_bytes()) for result in results]
    rows = compare(model, Cluster(workers, rate), measured)
    return {
        "model": model,
        "workers": workers,
        "bandwidth": bandwidth,
        "load": [load, os.getloadavg()[0]],
        "machine": describe_machine(),
        "build": describe_build(),
        "command": " ".join(sys.argv),
        "rows": rows,
    }


def run_rank(arguments: argparse.Namespace) -> None:
    """Measures, and pickles a dict: what `measure` returns."""
    import torch.distributed as dist

    settings, rank = settings_of(arguments.model[0], arguments.workers[0]), arguments.rank
    join(rank, settings.workers)
    arguments.result.write_bytes(pickle.dumps(measure(settings, rank, arguments.rounds)))
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: TrainSettings, rank: int, rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from gradwire.plan.recorder import StepRecorder, without_exchange
    from gradwire.torch import GradwireState, gradwire_hook
    from gradwire.train import data, models
    from gradwire.train.strategies import local_optimizer
    from gradwire.train.strategy import Strategy
    from gradwire.train.torch_ddp import distribute

    images = data.load(settings.data, settings.data_dir)
    batches = images.batches(settings.batch, settings.workers, rank, settings.seed)
    buckets: dict[str, list[tuple[int, list[tuple[str, tuple[int, ...]]], Any]]] = {}

    def build() -> torch.nn.Module:
        return models.build(
            settings.model, *images.shape, seed=0, width=settings.width, dropout=0.0
        )

    alone = build()
    recorder = StepRecorder(alone)

    def make(way: str) -> Strategy:
        if way == ALONE:
            optimizer = local_optimizer(alone, settings)
            return Strategy(alone, optimizer, forward=without_exchange(alone))
        model = build()
        optimizer = local_optimizer(model, settings)
        forward = distribute(model)
        if way == DDP:
            return Strategy(model, optimizer, forward=forward)
        state = GradwireState(codec=way, start_iter=settings.start_iter)
        names = {parameter: name for name, parameter in model.named_parameters()}
        buckets[way] = []

        def record_and_exchange(state: GradwireState, bucket: Any) -> Any:
            shapes = [(names[p], tuple(p.shape)) for p in bucket.parameters()]
            buckets[way].append((bucket.index(), shapes, bucket.buffer().numpy().copy()))
            return gradwire_hook(state, bucket)

        # DDP refuses annotations that are strings.
        forward.register_comm_hook(state, lambda state, bucket: record_and_exchange(state, bucket))
        return Strategy(model, optimizer, state, forward)

    made = {way: make(way) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sent: dict[str, list[float]] = {way: [] for way in CODECS}
    meter = TransportMeter([1])
    step = 0
    for _ in range(rounds):
        for _ in range(BLOCK):
            meter.measure()
        for way, strategy in made.items():
            for _ in range(BLOCK):
                inputs, targets = (torch.from_numpy(array) for array in batches.at(step))
                dist.barrier()
                began = time.perf_counter()
                if way == ALONE:
                    with recorder:
                        recorder.begin_step()
                        strategy.take_step(inputs, targets).item()
                        recorder.end_step()
                else:
                    strategy.take_step(inputs, targets).item()
                seconds[way].append(time.perf_counter() - began)
                if way in sent:
                    costs = strategy.last_costs()
                    sent[way].append(costs.push_bytes + costs.pull_bytes if costs else 0.0)
                step += 1
    gradients = {n: p.grad.numpy() for n, p in alone.named_parameters() if p.grad is not None}
    speeds = {}
    for codec in CODECS:
        dist.barrier()
        speeds[codec] = measure_codec(codec, [gradients])
    transport = meter.close()
    for strategy in made.values():
        strategy.close()
    return {
        "seconds": seconds,
        "marks": recorder.steps,
        "speeds": speeds,
        "transport": transport,
        "buckets": buckets,
        "sent": sent,
        "model": alone if rank == 0 else None,
    }


# The comparison


def compare(model: str, cluster: Cluster, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way of rank 0's WAYS but ALONE."""
    profile = profile_of_ranks(model, ranks)
    buckets = cut_buckets(profile)
    rows = []
    for way in WAYS[1:]:
        steps = zip(*(rank["seconds"][way] for rank in ranks), strict=True)
        measured = median([max(step) for step in steps][BLOCK:])
        row: dict[str, Any] = {"way": way, "measured_ms": 1e3 * measured}
        row["compute_ms"] = 1e3 * profile.compute_seconds
        exchange = DDP if way == DDP else SHARDED
        row["predicted_ms"] = 1e3 * predict(profile, cluster, way, exchange, buckets).seconds
        if way in CODECS:
            row |= simulate_row(profile, cluster, way, ranks, buckets)
        rows.append(row)
    return rows


def profile_of_ranks(model: str, ranks: list[dict[str, Any]]) -> Profile:
    from dataclasses import replace

    from gradwire.plan.recorder import profile_of

    def middle(values: Iterator[Any]) -> Any:
        found = [vars(value) for value in values]
        return {name: median(one[name] for one in found) for name in found[0]}

    profile = profile_of(model, ranks[0]["model"], [rank["marks"] for rank in ranks])
    codecs = {c: CodecSpeed(**middle(rank["speeds"][c] for rank in ranks)) for c in CODECS}
    transport = Transport(**middle(rank["transport"] for rank in ranks))
    return replace(profile, codecs=codecs, transport=transport)


def simulate_row(
    profile: Profile, cluster: Cluster, way: str, ranks: list[dict[str, Any]], cut: list[Bucket]
) -> dict[str, Any]:
    """Step time and bytes of a simulation with the gradients of the measured steps."""
    recorded = [rank["buckets"][way] for rank in ranks]
    # DDP makes other buckets after the first step, which goes raw.
    _, first, second, *_ = (i for i, (index, _, _) in enumerate(recorded[0]) if index == 0)
    of_step = second - first
    shapes = [shapes for _, shapes, _ in recorded[0][first : first + of_step]]
    buckets = [
        Bucket(tuple(Layer(name, dims, 0.0) for name, dims in tensors), ready)
        for tensors, ready in zip(shapes, (bucket.ready for bucket in cut), strict=True)
    ]
    steps = (len(recorded[0]) - first) // of_step
    values = np.concatenate(
        [
            recorded[rank][first + step * of_step + bucket][2]
            for step in range(steps)
            for rank in range(cluster.ranks)
            for bucket in range(of_step)
        ]
    )
    costs = profile.codecs
    done = simulate(
        cluster,
        way,
        SHARDED,
        buckets,
        values,
        cost=lambda codec: (costs[codec].encode_seconds, costs[codec].decode_seconds),
        message_seconds=profile.transport.message_seconds,
        steps=steps,
        stride=profile.numel,
    )
    backward_end = profile.forward_seconds + profile.backward_seconds
    sent = sum(sum(rank["sent"][way][1:]) for rank in ranks)
    return {
        "simulated_ms": 1e3 * (max(done.seconds, backward_end) + profile.rest_seconds),
        "sent_bytes": sent,
        "simulated_bytes": round(done.bytes_of_all * steps),
    }


def render(folder: Path) -> None:
    """Prints the table of all files: measured ms, and predicted and simulated as shares of it."""
    print(f"| model, workers, link | {' | '.join(f'`{way}`' for way in WAYS)} | bytes | load |")
    print(f"| --- | {' | '.join('---:' for _ in WAYS)} | ---: | ---: |")
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    for one in sorted(found, key=lambda f: (f["model"], f["workers"], f["bandwidth"])):
        cells = [f"{one['model']}, {one['workers']}, {one['bandwidth']}"]
        cells.append(f"{one['rows'][0]['compute_ms']:.0f}")
        for row in one["rows"]:
            times = [row[name] for name in ("predicted_ms", "simulated_ms") if name in row]
            shares = "; ".join(f"{time / row['measured_ms']:.2f}" for time in times)
            cells.append(f"{row['measured_ms']:.0f} ({shares})")
        cells.append(", ".join(sorted({same(row) for row in one["rows"] if "sent_bytes" in row})))
        cells.append(f"{max(one['load']):.0f}")
        print(f"| {' | '.join(cells)} |")


def same(row: dict[str, Any]) -> str:
    """The simulated bytes of all ranks and steps, next to the sent bytes."""
    difference = row["simulated_bytes"] - row["sent_bytes"]
    return "the same" if difference == 0 else f"{difference:+.0f}"


if __name__ == "__main__":
    main()
