"""The time of a step on a device, with delays of copies, of encoding and of sending.

    python bench/staging.py [--layer-ms 10] [--delay-ms 5] [--json staging.json]

Two ranks train a model whose backward pass takes `--layer-ms` for each of its layers. The CPU
plays a device: values are staged as for a GPU, over streams that are threads. Each copy, each
encoding and each sending takes `--delay-ms` for the bytes of a layer more than here. The hook has
a bucket for each layer, LocalSteps one for the model. First the script checks that the parameters
are the same bits whatever the delays and the overlap are. Times are medians over all steps, of
blocks that take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delayed_device import DelayedStage
from gradwire.machine import describe_build, describe_machine
from gradwire.torch import GradwireState, LocalSteps, Overlap, Schedule, gradwire_hook
from ranks import join, run_ranks

RANKS, LAYERS, WIDTH = 2, 8, 128
LAYER_BYTES = 4 * WIDTH * WIDTH
CODEC = "3lc:s=1.00,coder=rice"
WARM_UP, BLOCK = 4, 4
# Of copies (each way), encoding and sending, as shares of the delay.
DELAYS = {
    "none": (0, 0, 0),
    "copies": (1, 0, 0),
    "encoding": (0, 1, 0),
    "sending": (0, 0, 1),
    "all": (1, 1, 1),
}
WAYS = ("hook", "LocalSteps")


class Measured(NamedTuple):
    """A way's steps: of one kind of overlap."""

    step_ms: float
    copied_bytes: float
    copies: float
    waits: float
    digest: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layer-ms", type=float, default=10.0, help="backward of a layer")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="for the bytes of a layer")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        given.result.write_text(json.dumps(measure_all(given)))
        return
    with tempfile.TemporaryDirectory() as folder:

        def command(rank: int) -> list[str]:
            own = ["--rank", str(rank), "--result", f"{folder}/{rank}.json"]
            own += ["--layer-ms", str(given.layer_ms), "--delay-ms", str(given.delay_ms)]
            return [*own, "--blocks", str(given.blocks)]

        run_ranks(command, RANKS, None)
        rows = json.loads(Path(folder, "0.json").read_text())
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "build": describe_build(),
        "machine": describe_machine(),
        "rows": rows,
    }
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| way | delayed | bytes copied | copies | waits | with overlap, ms | without, ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        on, off = Measured(**row["on"]), Measured(**row["off"])
        lines.append(
            f"| {row['way']} | {row['delayed']} | {on.copied_bytes:,.0f} | {on.copies:g} | "
            f"{on.waits:g} | {on.step_ms:.0f} | {off.step_ms:.0f} |"
        )
    return "\n".join(lines)


def measure_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The measurements of one rank."""
    join(given.rank, RANKS)
    rows: list[dict[str, Any]] = []
    digests: dict[str, set[str]] = {}
    for way in WAYS:
        for delayed, shares in DELAYS.items():
            delays = [share * given.delay_ms / 1e3 for share in shares]
            with delayed_engine(*delays) as stages:
                trainings = {}
                for name in ("on", "off"):
                    trainings[name] = Training(way, name == "on", given.layer_ms / 1e3, stages)
                for _ in range(given.blocks):
                    for each in trainings.values():
                        each.run(BLOCK)
                found = {name: each.measured() for name, each in trainings.items()}
            for name, numbers in found.items():
                # (LocalSteps with overlap applies changes a step later, and ends elsewhere.)
                digests.setdefault(f"{way} {way != 'hook' and name}", set()).add(numbers.digest)
            rows.append({"way": way, "delayed": delayed})
            rows[-1] |= {name: numbers._asdict() for name, numbers in found.items()}
    for of, values in digests.items():
        if len(values) != 1:
            raise SystemExit(f"the parameters of {of} depend on the delays, or on the overlap")
    return rows


@contextmanager
def delayed_engine(copy: float, encode: float, send: float) -> Iterator[list[DelayedStage]]:
    """Inside, sessions work on a delayed device; the list has their stages. Each delay is for the
    bytes of a layer."""
    from gradwire.torch.buckets import bucket, session
    from gradwire.torch.network.engine import finish_step

    average = bucket.Bucket.average
    layers = threading.local()  # of the bucket under way
    stages: list[DelayedStage] = []

    def stage_for(*_: Any, **__: Any) -> DelayedStage:
        stages.append(DelayedStage(lambda nbytes: copy * nbytes / LAYER_BYTES))
        return stages[-1]

    def encode_slowly(self: Any, job: Any, *others: Any) -> None:
        layers.count = job.values.nbytes / LAYER_BYTES
        time.sleep(encode * layers.count)
        average(self, job, *others)

    def send_slowly(*of_step: Any) -> None:
        time.sleep(send * layers.count)
        finish_step(*of_step)

    with (
        mock.patch.object(session, "stage_for", stage_for),
        mock.patch.object(bucket.Bucket, "average", encode_slowly),
        mock.patch.object(bucket, "finish_step", send_slowly),
    ):
        yield stages


class Training:
    """A way, its device, and the time of each of its steps."""

    def __init__(
        self, way: str, overlap: bool, layer_seconds: float, stages: list[DelayedStage]
    ) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(Layer(layer_seconds) for _ in range(LAYERS)))
        self._seconds: list[float] = []
        self._called: nn.Module = self._model
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._optimizer: Any = optimizer
        self._source: Any
        if way == "hook":
            ddp = self._called = DistributedDataParallel(
                self._model, bucket_cap_mb=LAYER_BYTES / 2**20, gradient_as_bucket_view=True
            )
            on_or_off = Overlap.ON if overlap else Overlap.OFF
            self._source = GradwireState(CODEC, overlap=on_or_off, start_iter=0)
            ddp.register_comm_hook(self._source, gradwire_hook)
        else:
            schedule = Schedule(delay=1 if overlap else 0)
            self._source = LocalSteps(optimizer, self._model, CODEC, schedule=schedule)
            self._optimizer = self._source
        self._own_stages = stages
        self.run(WARM_UP)
        self._own_stages = [stages.pop()]
        (self._stage,) = self._own_stages
        self._seconds.clear()
        self._stage.copier.counts.clear()
        self._stage.stream.waits = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            torch.manual_seed(2 * len(self._seconds) + dist.get_rank())
            inputs = torch.randn(16, WIDTH)
            dist.barrier()
            began = time.perf_counter()
            self._optimizer.zero_grad()
            self._called(inputs).square().mean().backward()
            for stage in self._own_stages if self._called is not self._model else ():
                stage.stream.end()  # as DDP's stream waits for the results on a GPU
            self._optimizer.step()
            self._seconds.append(time.perf_counter() - began)

    def measured(self) -> Measured:
        steps, counts = len(self._seconds), self._stage.copier.counts
        self._source.close()
        values = [p.detach().numpy().tobytes() for p in self._model.parameters()]
        return Measured(
            1e3 * statistics.median(self._seconds),
            counts["bytes"] / steps,
            counts["copies"] / steps,
            self._stage.stream.waits / steps,
            hashlib.sha256(b"".join(values)).hexdigest(),
        )


class _Slow(torch.autograd.Function):
    """Its backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow: torch.Tensor = _Slow.apply(  # type: ignore[no-untyped-call]
            torch.tanh(self.linear(x)), self._seconds
        )
        return slow


if __name__ == "__main__":
    main()
