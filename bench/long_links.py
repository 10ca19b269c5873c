"""The time of a step of DDP with the hook, whose buckets follow each other, over long links.

    python bench/long_links.py [--codec small] [--exchange sharded] [--layers 12]
                               [--latency 0.02] [--rate 100000000]

Four ranks on this machine, each behind a link of its own: so many bits a second, and seconds that a
packet travels. Each layer of 256 x 256 is a bucket, of DDP's second step on. Prints the number of
buckets and the median step. Needs root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings

from ranks import join, run_ranks

RANKS, WIDTH, BATCH = 4, 256, 8
WARM_UP, STEPS = 4, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="small")
    parser.add_argument("--exchange", default="sharded")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rate", type=int, default=10**8)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is None:
        own = sys.argv[1:]
        run_ranks(
            lambda rank: [*own, "--rank", str(rank)],
            RANKS,
            arguments.rate,
            latency=arguments.latency,
        )
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    join(arguments.rank, RANKS)
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.torch import GradwireState, gradwire_hook

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(arguments.layers)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=4 * WIDTH * WIDTH / 2**20)
    state = GradwireState(codec=arguments.codec, exchange=arguments.exchange)
    ddp.register_comm_hook(state, gradwire_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        ddp(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    if arguments.rank == 0:
        buckets = str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).count(",") + 1
        median = statistics.median(seconds[WARM_UP:])
        print(f"{buckets} buckets, {median * 1000:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
