"""The time of a step on a device, with delays of copies, of encoding and of sending.

    python bench/staging.py [--layer-ms 10] [--delay-ms 5] [--json staging.json]

Three ranks train a model whose backward pass takes `--layer-ms` for each of its layers. The CPU
plays a device: values are staged as for a GPU, over streams that are threads. Each copy, each
encoding and each sending takes `--delay-ms` for the bytes of a layer more than here. (Half of an
encoding measures values as they arrive, half of it encodes shard after shard; a link of each rank
sends one message after the other.) The hook has a bucket for each layer, LocalSteps one for the
model. In pieces: copies of half a layer, and each packet is sent as soon as it is encoded; whole:
all of a bucket is copied, then encoded, then sent. In turn: a bucket is not encoded while the one
before it waits for messages, as is else done. First the script checks that the parameters are the
same bits whatever the delays and the overlap are. Times are medians over all steps, of blocks that
take turns.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
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

RANKS, LAYERS, WIDTH = 3, 8, 128
LAYER_BYTES = 4 * WIDTH * WIDTH
CODEC = "3lc:s=1.00,coder=rice"
WARM_UP, BLOCK = 4, 3
# Of copies (each way), encoding and sending, as shares of the delay.
DELAYS = {
    "none": (0, 0, 0),
    "copies": (1, 0, 0),
    "encoding": (0, 1, 0),
    "sending": (0, 0, 1),
    "encoding and sending": (0, 1, 1),
    "all": (1, 1, 1),
}
WAYS = ("hook", "LocalSteps")


class Kind(NamedTuple):
    """Of a training. ahead: the next bucket is encoded while one waits."""

    overlap: bool
    pieces: bool = True
    ahead: bool = True


TRAININGS = {
    "overlap": Kind(True),
    "overlap, in turn": Kind(True, ahead=False),
    "overlap, whole": Kind(True, pieces=False, ahead=False),
    "no overlap": Kind(False),
    "no overlap, whole": Kind(False, pieces=False),
}


class Devices(NamedTuple):
    """Of one rank: its delays, and the stages of its sessions."""

    delays: Delays
    stages: list[DelayedStage]


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
    parser.add_argument("--way", choices=WAYS, help="this one alone")
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
            own += ["--way", given.way] if given.way else []
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
    kinds = [f"{kind}, ms" for kind in TRAININGS]
    lines = [
        f"| way | delayed | bytes copied | copies | waits | {' | '.join(kinds)} |",
        f"| --- | --- | ---: | ---: | ---: |{len(kinds) * ' ---: |'}",
    ]
    for row in rows:
        found = [Measured(*row[kind]) for kind in TRAININGS]
        on = found[0]
        times = " | ".join(f"{each.step_ms:.0f}" for each in found)
        lines.append(
            f"| {row['way']} | {row['delayed']} | {on.copied_bytes:,.0f} | {on.copies:.3g} | "
            f"{on.waits:.3g} | {times} |"
        )
    return "\n".join(lines)


def measure_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The measurements of one rank."""
    join(given.rank, RANKS)
    rows: list[dict[str, Any]] = []
    digests: dict[str, set[str]] = {}
    for way in WAYS if given.way is None else (given.way,):
        for delayed, shares in DELAYS.items():
            delays = [share * given.delay_ms / 1e3 for share in shares]
            with delayed_engine(*delays) as devices:
                trainings = {
                    name: Training(way, kind, given.layer_ms / 1e3, devices)
                    for name, kind in TRAININGS.items()
                }
                for _ in range(given.blocks):
                    for each in trainings.values():
                        each.run(BLOCK)
                found = {name: each.measured() for name, each in trainings.items()}
            for name, numbers in found.items():
                # (LocalSteps with overlap applies changes a step later, and ends elsewhere.)
                key = f"{way} {way != 'hook' and TRAININGS[name].overlap}"
                digests.setdefault(key, set()).add(numbers.digest)
            rows.append({"way": way, "delayed": delayed})
            rows[-1] |= {name: list(numbers) for name, numbers in found.items()}
    for of, values in digests.items():
        if len(values) != 1:
            raise SystemExit(f"the parameters of {of} depend on the delays, or on the overlap")
    return rows


class Link:
    """Sends one message after the other, each in its time."""

    def __init__(self) -> None:
        self._queue: Queue[tuple[float, Callable[[], None]]] = Queue()
        threading.Thread(target=self._run, daemon=True).start()
        self.drain = self._queue.join

    def send(self, seconds: float, work: Callable[[], None]) -> None:
        self._queue.put((seconds, work))

    def _run(self) -> None:
        while True:
            seconds, work = self._queue.get()
            time.sleep(seconds)
            work()
            self._queue.task_done()


class Delays:
    """Of a rank's engine. `kind`: of the training that runs."""

    def __init__(self, encode: float, send: float) -> None:
        self.kind = Kind(overlap=True)
        self._encode, self._send = encode, send
        self._links: dict[int, Link] = {}
        self._layers = 0.0  # of the bucket under way
        self._held: list[Callable[[], None]] = []

    def begin(self, values: torch.Tensor) -> None:
        self._layers = values.nbytes / LAYER_BYTES

    def arrive(self, values: int) -> None:
        """Half of encoding looks at all values."""
        time.sleep(self._encode / 2 * 4 * values / LAYER_BYTES)

    def make_packet(self, layers: float) -> None:
        """Half of encoding makes the packets, of which each shard is a part."""
        time.sleep(self._encode / 2 * layers / RANKS)

    def send(self, wire: Any, work: Callable[[], None]) -> None:
        if id(wire) not in self._links:
            self._links[id(wire)] = Link()
        seconds = self._send * self._layers / (2 * (RANKS - 1))
        self._held.append(partial(self._links[id(wire)].send, seconds, work))
        if self.kind.pieces:
            self.release()

    def release(self) -> None:
        for hand_over in self._held:
            hand_over()
        self._held.clear()

    def drain(self, wire: Any) -> None:
        if id(wire) in self._links:
            self._links[id(wire)].drain()


@contextmanager
def delayed_engine(copy: float, encode: float, send: float) -> Iterator[Devices]:
    """Inside, sessions work on a delayed device. Each delay is for the bytes of a layer."""
    from gradwire.torch.buckets import bucket, bucket_runner, session
    from gradwire.torch.network import engine, wire
    from gradwire.torch.staging import pieces

    average, flush, send_now = bucket.Bucket.average, wire.Wire.flush, engine._send
    can_encode_ahead = bucket_runner.BucketRunner.can_encode_ahead
    delays = Delays(encode, send)
    devices = Devices(delays, [])

    def stage_for(*_: Any, **__: Any) -> DelayedStage:
        devices.stages.append(DelayedStage(lambda nbytes: copy * nbytes / LAYER_BYTES))
        return devices.stages[-1]

    def average_slowly(self: Any, job: Any, *others: Any) -> None:
        delays.begin(job.values)
        average(self, job, *others)

    def encode_ahead_or_not(self: Any, job: Any) -> bool:
        return delays.kind.ahead and can_encode_ahead(self, job)

    def send_slowly(to: Any, *of: Any) -> None:
        delays.send(to, lambda: send_now(to, *of))

    def flush_slowly(self: Any, *of: Any, **named: Any) -> None:
        delays.drain(self)
        flush(self, *of, **named)

    class Events(engine.StepEvents):
        def __init__(self, wire: Any, values: Any, gives_back: bool) -> None:
            super().__init__(wire, values, gives_back)
            self._numel = values.values.numel()
            self._arrived, self._packets = 0, set[int]()

        def arrive(self, end: int) -> int:
            arrived = super().arrive(end if delays.kind.pieces else self._numel)
            delays.arrive(arrived - self._arrived)
            self._arrived = arrived
            return arrived

        def send(self, peer: int, message: Any) -> None:
            address = message.__array_interface__["data"][0]
            if address not in self._packets:
                self._packets.add(address)
                delays.make_packet(4 * self._numel / LAYER_BYTES)
            super().send(peer, message)

        def finished(self, begin: int, n: int) -> None:
            if delays.kind.pieces:
                super().finished(begin, n)

        def check(self) -> None:
            delays.release()
            super().check()

    with (
        mock.patch.object(session, "stage_for", stage_for),
        mock.patch.object(bucket.Bucket, "average", average_slowly),
        mock.patch.object(bucket, "StepEvents", Events),
        mock.patch.object(bucket_runner.BucketRunner, "can_encode_ahead", encode_ahead_or_not),
        mock.patch.object(engine, "_send", send_slowly),
        mock.patch.object(wire.Wire, "flush", flush_slowly),
        mock.patch.object(pieces, "PIECE_BYTES", LAYER_BYTES // 2),
    ):
        yield devices


class Training:
    """A way, its device, and the time of each of its steps."""

    def __init__(self, way: str, kind: Kind, layer_seconds: float, devices: Devices) -> None:
        torch.manual_seed(0)
        self._delays, self._kind = devices.delays, kind
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
            on_or_off = Overlap.ON if kind.overlap else Overlap.OFF
            self._source = GradwireState(CODEC, overlap=on_or_off, start_iter=0)
            ddp.register_comm_hook(self._source, gradwire_hook)
        else:
            schedule = Schedule(delay=1 if kind.overlap else 0)
            self._source = LocalSteps(optimizer, self._model, CODEC, schedule=schedule)
            self._optimizer = self._source
        self._own_stages = devices.stages
        self.run(WARM_UP)
        self._own_stages = [devices.stages.pop()]
        (self._stage,) = self._own_stages
        self._seconds.clear()
        self._stage.copier.counts.clear()
        self._stage.stream.waits = 0

    def run(self, steps: int) -> None:
        self._delays.kind = self._kind
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
