"""The time and the memory of a step of FSDP2, with PyTorch's communication and with gradwire's.

    python bench/fsdp.py [--mesh hsdp] [--bandwidth 100mbit] [--width 256] [--rounds 3]
                         [--json fsdp.json]

Two machines with two ranks each, on this machine: the ranks of a machine share a network namespace
and its rate-limited link. They train the byte-level transformer of `gradwire train` on random
bytes. hsdp: a replica on each machine, sharded among its ranks. fsdp: sharded among all four.
Without --bandwidth the ranks use the loopback. Each way to communicate is a job of its own, so that
its memory is its own; the ways take turns. A time is the median over all steps and rounds, memory
the largest resident set of a rank, the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gradwire.machine import describe_build, describe_machine
from gradwire.torch.options import grouped
from gradwire_lab.train import network
from gradwire_lab.train.settings import parse_bandwidth
from ranks import join, run_ranks

MACHINES, PER_MACHINE = 2, 2
WARM_UP, STEPS, BATCH, CONTEXT = 3, 8, 8, 64
PYTORCH = "PyTorch"
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "hsdp": {
        PYTORCH: {},
        "bf16": {"codec": "bf16"},
        "int8": {"codec": "int8"},
        "int8, no overlap": {"codec": "int8", "overlap": False},
        "qsgd:bits=4": {"codec": "qsgd:bits=4"},
        "3lc:s=1.00,coder=rice": {"codec": "3lc:s=1.00,coder=rice"},
    },
    "fsdp": {
        PYTORCH: {},
        "int8": {"codec": "int8"},
        "int8, weights bf16": {"codec": "int8", "weights": "bf16"},
        "int8, weights int8:bucket=256": {"codec": "int8", "weights": "int8:bucket=256"},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", choices=list(WAYS), default="hsdp")
    parser.add_argument("--bandwidth")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        arguments.result.write_text(json.dumps(measure(arguments)))
        return
    rate = None if arguments.bandwidth is None else parse_bandwidth(arguments.bandwidth)
    if rate is not None and (reason := network.why_not_shaped()):
        raise SystemExit(f"the links cannot be shaped: {reason}")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS[arguments.mesh]}
    load = [os.getloadavg()[0]]
    for _ in range(arguments.rounds):
        for way, runs in found.items():
            runs.append(run(arguments, way, rate))
    load.append(os.getloadavg()[0])
    rows = [summarize(way, runs) for way, runs in found.items()]
    for row in rows:
        print(in_words(row, rows[0]))
    if arguments.json is not None:
        document = {
            "mesh": arguments.mesh,
            "bandwidth": arguments.bandwidth,
            "width": arguments.width,
            "load": load,
            "machine": describe_machine(),
            "build": describe_build(),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def run(arguments: argparse.Namespace, way: str, rate: int | None) -> dict[str, Any]:
    """A job of one way; the numbers of rank 0."""
    with tempfile.TemporaryDirectory() as folder:

        def command(rank: int) -> list[str]:
            own = ["--rank", str(rank), "--result", f"{folder}/{rank}.json", "--way", way]
            return [*own, "--mesh", arguments.mesh, "--width", str(arguments.width)]

        run_ranks(command, MACHINES * PER_MACHINE, rate, PER_MACHINE)
        result: dict[str, Any] = json.loads(Path(folder, "0.json").read_text())
        return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The job of one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gradwire.torch import FullyShardComm
    from gradwire_lab.train.text_models import Gpt

    class Training(Gpt):
        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(super().forward(text), text.flatten())

    join(arguments.rank, MACHINES * PER_MACHINE)
    torch.manual_seed(0)
    model = Training(256, CONTEXT, arguments.width, 0.0)
    mesh = init_device_mesh("cpu", (MACHINES * PER_MACHINE,))
    if arguments.mesh == "hsdp":
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (MACHINES, PER_MACHINE), mesh_dim_names=names)
    values = sum(parameter.numel() for parameter in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options = WAYS[arguments.mesh][arguments.way]
    comm = FullyShardComm(model, start_iter=0, **grouped(options)) if options else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for step in range(WARM_UP + STEPS):
        torch.manual_seed(2 * step + arguments.rank)
        text = torch.randint(0, 256, (BATCH, CONTEXT))
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(text).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    sent = None
    if comm is not None:
        stats, weights = comm.stats(), comm.weights_stats()
        of_weights = 0 if weights is None else weights.pull_bytes
        sent = (stats.push_bytes + stats.pull_bytes + of_weights) / stats.steps
        comm.close()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "values": values,
        "step_seconds": seconds[WARM_UP:],
        "sent_bytes": sent,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def summarize(way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [step for run in runs for step in run["step_seconds"]]
    return {
        "way": way,
        "values": runs[0]["values"],
        "step_seconds": statistics.median(seconds),
        "rounds": [statistics.median(run["step_seconds"]) for run in runs],
        "sent_bytes": runs[0]["sent_bytes"],
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
    }


def in_words(row: dict[str, Any], base: dict[str, Any]) -> str:
    sent = "" if row["sent_bytes"] is None else f", {row['sent_bytes']:,.0f} bytes sent by gradwire"
    faster = base["step_seconds"] / row["step_seconds"]
    return (
        f"{row['way']}: {1e3 * row['step_seconds']:.1f} ms a step, {faster:.2f} x, peak "
        f"{row['peak_bytes'] / 2**20:.0f} MiB a rank ({row['values']:,} values){sent}"
    )


if __name__ == "__main__":
    main()
