#!/usr/bin/env python3
"""Compares predicted and simulated steps with measured steps behind shaped links.

    bench/planning.py results [--model lenet] [--workers 2 --workers 4] [--bandwidth 10mbit]
    bench/planning.py results --workers 4 --servers 2      # with dedicated servers
    bench/planning.py results --workers 4 --every 4        # local steps
    bench/planning.py results --render

Workers in network namespaces, each behind a rate-limited link, train one model in several ways, in
blocks of steps that take turns. One of them, `alone`, is DDP that exchanges nothing, and gives the
profile; what bytes cost is measured over the loopback. So the profile sees the same contention as
the others: all ranks share the cores of this machine, with whatever else runs there. A step lasts
from a barrier of all ranks to the end of the last worker's step; figures are medians. With --every
K it is the mean of the medians of K kinds of steps, the last of which exchange. Each combination
leaves a file in the folder and is not repeated.

The bytes of gradwire's codecs are compared with a simulation that gets the recorded gradients, or
the changes that local steps exchange. Servers are those that average (`server:pulls=gradients`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from gradwire.local_schedule import Schedule
from gradwire.machine import describe_build, describe_machine
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.meters import measure_bytes
from gradwire_lab.plan.predict import DDP, LayerBucket, cut_buckets, predict
from gradwire_lab.plan.profile import CodecSpeed, Layer, MessageCosts, Profile
from gradwire_lab.plan.simulate import simulate
from gradwire_lab.train import network
from gradwire_lab.train.options import from_options
from gradwire_lab.train.settings import SERVED, SHARDED, TrainSettings, parse_bandwidth
from planning_ranks import ALONE, CODECS, Kind, measure
from ranks import join, run_ranks

(AVERAGING,) = (name for name, pulls in SERVED.items() if pulls == "gradients")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", default=None)
    parser.add_argument("--workers", action="append", type=int, default=None)
    parser.add_argument("--bandwidth", action="append", default=None)
    parser.add_argument("--servers", type=int, default=0, help="ranks beside the workers")
    parser.add_argument("--every", type=int, default=1, help="local steps")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind")
    parser.add_argument("--render", action="store_true", help="only print the table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--values", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    kind = Kind(arguments.servers, arguments.every)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.render:
        if reason := network.why_not_shaped():
            raise SystemExit(f"the links cannot be shaped: {reason}")
        for model, workers, bandwidth in product(
            arguments.model or ("lenet", "resnet20"),
            arguments.workers or (2, 4, 8),
            arguments.bandwidth or ("10mbit", "100mbit", "1gbit"),
        ):
            of = f"-{kind.servers}-servers" * bool(kind.servers) + f"-every-{kind.every}" * (
                kind.every > 1
            )
            file = arguments.folder / f"{model}-{workers}-{bandwidth}{of}.json"
            if not file.exists():
                document = check(model, workers, bandwidth, kind, arguments.rounds)
                file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                print(f"wrote {file}", flush=True)
    render(arguments.folder)


def build(model: str) -> Any:
    """The untrained model."""
    from gradwire_lab.train import data, models

    chosen = settings_of(model, 1)
    shape = data.load(chosen.data, chosen.data_dir).shape
    return models.build(model, *shape, seed=0, width=chosen.width, dropout=0.0)


def settings_of(model: str, workers: int) -> TrainSettings:
    options = {"model": model, "workers": workers, "steps": 1000, "exchange": SHARDED, "every": 1}
    return from_options(options | {"start_iter": 1})


# The processes


def check(model: str, workers: int, bandwidth: str, kind: Kind, rounds: int) -> dict[str, Any]:
    """Measures one combination, and predicts it."""
    load = os.getloadavg()[0]
    options = ["--model", model, "--workers", str(workers), "--rounds", str(rounds)]
    options += ["--servers", str(kind.servers), "--every", str(kind.every)]
    rate = parse_bandwidth(bandwidth)
    assert rate is not None
    measured = on_ranks(options, workers + kind.servers, rate)[:workers]
    values = sum(parameter.numel() for parameter in build(model).parameters())
    of_bytes = on_ranks([*options, "--values", str(values)], workers + kind.servers, None)
    # tbf counts what the models count: frames with their Ethernet headers. It is on both ends of a
    # link, which have a bucket for each direction, as in the simulation.
    cluster = Cluster(workers, rate, servers=kind.servers, burst=network.bucket_bytes(rate))
    rows = compare(model, cluster, kind, measured, of_bytes)
    return {
        "model": model,
        "workers": workers,
        "servers": kind.servers,
        "every": kind.every,
        "bandwidth": bandwidth,
        "burst": cluster.burst,
        "load": [load, os.getloadavg()[0]],
        "machine": describe_machine(),
        "build": describe_build(),
        "command": " ".join(sys.argv),
        "rows": rows,
    }


def on_ranks(options: list[str], ranks: int, rate: int | None) -> list[Any]:
    """What each rank measures, over links of so many bits a second, or the loopback."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.pt" for rank in range(ranks)]

        def command(rank: int) -> list[str]:
            return [folder, *options, "--rank", str(rank), "--result", str(results[rank])]

        run_ranks(command, ranks, rate)
        return [torch.load(result, weights_only=True) for result in results]


def run_rank(arguments: argparse.Namespace) -> None:
    """Measures, and saves what it found: what bytes cost, of a bucket of so many values, or the
    dict of `measure`."""
    import torch
    import torch.distributed as dist

    settings, rank = settings_of(arguments.model[0], arguments.workers[0]), arguments.rank
    kind = Kind(arguments.servers, arguments.every)
    join(rank, settings.workers + kind.servers)
    found: Any
    if arguments.values:
        found = measure_bytes(arguments.values, arguments.rounds)
    else:
        found = measure(settings, kind, rank, arguments.rounds)
    torch.save(found, arguments.result)
    dist.barrier()
    dist.destroy_process_group()


# The comparison


def compare(
    model: str,
    cluster: Cluster,
    kind: Kind,
    ranks: list[dict[str, Any]],
    of_bytes: list[tuple[float, float]],
) -> list[dict[str, Any]]:
    """A row for each way but ALONE. of_bytes: of each rank, what measure_bytes found."""
    profile = profile_of_ranks(model, ranks, of_bytes)
    buckets = cut_buckets(profile)
    exchange = AVERAGING if kind.servers else SHARDED
    rows = []
    for way in kind.ways[1:]:
        steps = [max(step) for step in zip(*(rank["seconds"][way] for rank in ranks), strict=True)]
        later = steps[kind.block :]
        measured = fmean(median(later[turn :: kind.every]) for turn in range(kind.every))
        row: dict[str, Any] = {"way": way, "measured_ms": 1e3 * measured}
        row["compute_ms"] = 1e3 * profile.compute_seconds
        taken = DDP if way == DDP else exchange
        schedule = Schedule(kind.every) if kind.every > 1 else None
        predicted = predict(profile, cluster, way, taken, buckets, schedule)
        row["predicted_ms"] = 1e3 * predicted.seconds
        if way in CODECS:
            row |= simulate_row(profile, cluster, kind, exchange, way, ranks, buckets)
        rows.append(row)
    return rows


def profile_of_ranks(
    model: str, ranks: list[dict[str, Any]], of_bytes: list[tuple[float, float]]
) -> Profile:
    from gradwire_lab.plan.recorder import profile_of

    def middle(values: Iterable[dict[str, float]]) -> Any:
        found = list(values)
        return {name: median(one[name] for one in found) for name in found[0]}

    profile = profile_of(model, build(model), [rank["marks"] for rank in ranks])
    codecs = {c: CodecSpeed(**middle(rank["speeds"][c] for rank in ranks)) for c in CODECS}
    message, reduce = ranks[0]["messages"]  # all ranks have the same
    byte, reduce_byte = (median(costs) for costs in zip(*of_bytes, strict=True))
    return replace(
        profile, codecs=codecs, transport=MessageCosts(message, byte, reduce, reduce_byte)
    )


def simulate_row(
    profile: Profile,
    cluster: Cluster,
    kind: Kind,
    exchange: str,
    way: str,
    ranks: list[dict[str, Any]],
    cut: list[LayerBucket],
) -> dict[str, Any]:
    """Step time and bytes of a simulation with the gradients of the measured steps."""
    recorded = [rank["buckets"][way] for rank in ranks]
    begun = [i for i, (index, _, _) in enumerate(recorded[0]) if index == 0]
    first, second = begun[kind.uncompressed : kind.uncompressed + 2]
    of_step = second - first
    shapes = [shapes for _, shapes, _ in recorded[0][first : first + of_step]]
    ready = [bucket.ready for bucket in cut] if exchange == SHARDED else [cut[-1].ready]
    buckets = [
        LayerBucket(tuple(Layer(name, dims, 0.0) for name, dims in tensors), at)
        for tensors, at in zip(shapes, [0.0] if kind.every > 1 else ready, strict=True)
    ]
    steps = (len(recorded[0]) - first) // of_step
    values = np.concatenate(
        [
            recorded[rank][first + step * of_step + bucket][2].numpy()
            for step in range(steps)
            for rank in range(cluster.ranks)
            for bucket in range(of_step)
        ]
    )
    costs = profile.codecs
    done = simulate(
        cluster,
        way,
        exchange,
        buckets,
        values,
        cost=lambda codec: (costs[codec].encode_seconds, costs[codec].decode_seconds),
        message_seconds=profile.transport.message_seconds,
        pause=kind.every * profile.compute_seconds if kind.every > 1 else profile.rest_seconds,
        steps=steps,
        stride=profile.numel,
    )
    backward_end = profile.forward_seconds + profile.backward_seconds
    whole = max(done.seconds, backward_end) + profile.rest_seconds
    if kind.every > 1:
        whole = profile.compute_seconds + done.seconds / kind.every
    sent = sum(sum(rank["sent"][way][kind.uncompressed :]) for rank in ranks)
    return {
        "simulated_ms": 1e3 * whole,
        "sent_bytes": sent,
        "simulated_bytes": round(done.bytes_of_all * steps),
    }


def render(folder: Path) -> None:
    """Prints tables of all files: measured ms, and predicted and simulated as shares of it."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    for every in sorted({one["every"] for one in found}):
        for served in (False, True):
            of_kind = [f for f in found if f["every"] == every and (f["servers"] > 0) == served]
            if of_kind:
                render_kind(of_kind, served)


def render_kind(found: list[dict[str, Any]], served: bool) -> None:
    ways = [ALONE, *(row["way"] for row in found[0]["rows"])]
    who = "model, workers, servers, link" if served else "model, workers, link"
    print(f"| {who} | {' | '.join(f'`{way}`' for way in ways)} | bytes | load |")
    print(f"| --- | {' | '.join('---:' for _ in ways)} | ---: | ---: |")
    for one in sorted(found, key=lambda f: (f["model"], f["workers"], f["bandwidth"])):
        of = f"{one['workers']}, {one['servers']}" if served else f"{one['workers']}"
        cells = [f"{one['model']}, {of}, {one['bandwidth']}"]
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
