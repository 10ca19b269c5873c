"""The time of a step with and without communication during the backward pass, and the next step.

    python bench/overlap.py [--codec 3lc:s=1.75] [--bandwidth 100mbit] [--compute 40]
                            [--json overlap.json] [--device cuda] [--trace overlap-trace.json]

Two ranks on this machine train the same model in several buckets, each behind its own rate-limited
link if this process may build one; otherwise they use the loopback, and the result says so. Blocks
of steps with each kind of overlap take turns, so that all see the same noise. A block's time
includes its last exchange, which with next_step nothing hides. Times of a step are medians over the
blocks. First the script checks that with and without overlap the parameters are the same, bit for
bit. --compute adds milliseconds to each step, half before and half in the middle of the backward
pass, in which the CPU is idle, as while a GPU computes. With --device cuda, rank i takes GPU i
modulo the number of GPUs. --trace writes a timeline of rank 0's last steps with overlap, for
chrome://tracing: "gradwire bucket" runs in the communication thread, and on a GPU in its stream.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gradwire.machine import describe_build, describe_machine
from gradwire_lab.train import network
from ranks import join, run_ranks

RANKS = 2
LAYERS, WIDTH, BATCH = 8, 768, 128
BUCKET_MB = 2.5
WARM_UP, BLOCK = 4, 10
RATES = {"none": None, "10mbit": 10**7, "100mbit": 10**8, "1gbit": 10**9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="3lc:s=1.75")
    parser.add_argument("--bandwidth", default="100mbit", choices=list(RATES))
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each kind")
    parser.add_argument("--compute", type=float, default=0.0, help="idle milliseconds a step")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--trace", type=Path, help="write rank 0's timeline here")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        arguments.result.write_text(json.dumps(measure(arguments)))
        return
    result = run_all(arguments)
    print(json.dumps(result, indent=2))
    print(in_words(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the ranks, and adds the machine's description to rank 0's numbers."""
    rate = RATES[arguments.bandwidth]
    reason = "not asked for" if rate is None else network.why_not_shaped()
    shaped = reason is None
    with tempfile.TemporaryDirectory() as folder:

        def command(rank: int) -> list[str]:
            own = ["--rank", str(rank), "--result", f"{folder}/{rank}.json"]
            own += ["--codec", arguments.codec, "--blocks", str(arguments.blocks)]
            own += ["--device", arguments.device, "--compute", str(arguments.compute)]
            if arguments.trace is not None and rank == 0:
                own += ["--trace", str(arguments.trace)]
            return own

        run_ranks(command, RANKS, rate if shaped else None)
        measured = json.loads(Path(folder, "0.json").read_text())
    return {
        "command": shlex.join(["python", *sys.argv]),
        "build": describe_build(),
        "machine": describe_machine(),
        "codec": arguments.codec,
        "device": arguments.device,
        "compute_ms": arguments.compute,
        "link": arguments.bandwidth if shaped else f"loopback, not limited: {reason}",
        "ranks": RANKS,
        **measured,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement of one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.torch import GradwireState, Overlap, gradwire_hook

    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", arguments.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    class Training:
        """A model, and the time of each of its steps."""

        def __init__(self, overlap: Overlap) -> None:
            torch.manual_seed(0)
            layers = [
                layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())
            ]
            self.model = nn.Sequential(*layers).to(device)
            middle = self.model[LAYERS]  # of the 2 * LAYERS modules
            middle.register_full_backward_hook(lambda *_: time.sleep(idle))
            self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB)
            self.state = GradwireState(arguments.codec, overlap=overlap, start_iter=0)
            self.ddp.register_comm_hook(self.state, gradwire_hook)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
            self.steps = 0
            self.step_seconds: list[float] = []  # of each block, in the mean
            self.wire_seconds: list[float] = []
            self.buckets = 0
            self.early = 0.0

        def run(self, steps: int) -> None:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                torch.manual_seed(2 * self.steps + dist.get_rank())
                inputs = torch.randn(BATCH, WIDTH).to(device)
                self.optimizer.zero_grad()
                loss = self.ddp(inputs).square().mean()
                time.sleep(idle)
                loss.backward()
                synchronize()
                backward_ended = time.perf_counter()
                self.optimizer.step()
                synchronize()
                last = self.state.last_step()
                self.wire_seconds.append(last["wire_seconds"])
                self.buckets = len(last["buckets"])
                if last["buckets"]:  # with next_step the first one is under way
                    self.early = backward_ended - last["buckets"][0].started
                self.steps += 1
            assert self.state._session is not None
            self.state._session.drain()
            self.step_seconds.append((time.perf_counter() - begin) / steps)

        def digest(self) -> str:
            values = [p.detach().cpu().numpy() for p in self.model.parameters()]
            content = b"".join(v.tobytes() for v in values)
            return hashlib.sha256(content).hexdigest()

    idle = arguments.compute / 2000
    join(arguments.rank, RANKS)
    trainings = {overlap: Training(overlap) for overlap in Overlap}
    for training in trainings.values():
        training.run(WARM_UP)
    digests = {trainings[overlap].digest() for overlap in (Overlap.ON, Overlap.OFF)}
    if len(digests) != 1:
        raise SystemExit("with and without overlap the parameters differ")
    for _ in range(arguments.blocks):
        for training in trainings.values():
            training.run(BLOCK)
    if arguments.trace is not None:
        # Without this the profiler would not follow the communication thread.
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every) as profile:
            trainings[Overlap.ON].run(2)
        profile.export_chrome_trace(str(arguments.trace))
    else:
        trainings[Overlap.ON].run(2)  # as rank 0 does while it writes the trace
    dist.barrier()
    result: dict[str, Any] = {
        "values": sum(p.numel() for p in trainings[Overlap.ON].model.parameters()),
        "buckets": trainings[Overlap.ON].buckets,
    }
    for overlap, training in trainings.items():
        result[f"overlap_{overlap.value}"] = {
            "step_ms": 1e3 * statistics.median(training.step_seconds[1 : 1 + arguments.blocks]),
            "step_ms_of_blocks": [
                1e3 * seconds for seconds in training.step_seconds[1 : 1 + arguments.blocks]
            ],
            "wire_ms": 1e3 * statistics.median(training.wire_seconds[WARM_UP:]),
            "first_bucket_before_end_of_backward_ms": 1e3 * training.early,
        }
        training.state.close()
    dist.destroy_process_group()
    return result


def in_words(result: dict[str, Any]) -> str:
    on, off, late = (result[f"overlap_{kind}"] for kind in ("on", "off", "next_step"))
    saved = off["step_ms"] - on["step_ms"]
    return (
        f"{result['codec']}, {result['buckets']} buckets, link {result['link']}: a step takes "
        f"{on['step_ms']:.1f} ms with overlap, {off['step_ms']:.1f} ms without "
        f"({saved / off['step_ms']:.0%} saved, of {off['wire_ms']:.1f} ms on the wire), "
        f"{late['step_ms']:.1f} ms with averages one step late"
    )


if __name__ == "__main__":
    main()
