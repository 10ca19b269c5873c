"""QSVRG on L2-regularized logistic regression: a linear rate with compressed exchanges.

torchrun --nproc-per-node 4 examples/qsvrg.py

Without torchrun, the four workers are in one process and compute the same numbers.
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional

from gradwire.contrib.qsvrg import QSVRG
from gradwire.torch import loopback

WORKERS, EXAMPLES, FEATURES, REGULARIZATION = 4, 400, 96, 0.05

torch.manual_seed(0)  # all ranks make the same data, and each takes its share
inputs = functional.normalize(torch.randn(EXAMPLES, FEATURES))
labels = (inputs @ torch.randn(FEATURES)).sign()


def minimize(rank: int) -> None:
    share = EXAMPLES // dist.get_world_size()
    mine = slice(rank * share, (rank + 1) * share)
    weight = torch.nn.Parameter(torch.zeros(FEATURES))

    def loss_of(chosen: slice | torch.Tensor, rows: slice = mine) -> torch.Tensor:
        margins = labels[rows][chosen] * (inputs[rows][chosen] @ weight)
        return functional.softplus(-margins).mean() + REGULARIZATION * weight.square().sum() / 2

    optimizer = QSVRG(
        [weight],
        loss_of,
        share,
        smoothness=0.25 + REGULARIZATION,  # |input| = 1, so a gradient is 1/4-Lipschitz
        convexity=REGULARIZATION,
    )
    for epoch in range(4):
        done = optimizer.epoch()
        gradient = torch.autograd.grad(loss_of(slice(None), slice(None)), weight)[0]
        if rank == 0:
            bits = done.update_bits / done.steps / FEATURES
            print(
                f"epoch {epoch + 1}: |gradient| {float(gradient.norm()):.2e}, {done.steps} steps, "
                f"{bits:.2f} bits a value"
            )


if "RANK" in os.environ:
    dist.init_process_group("gloo")
    minimize(dist.get_rank())
    dist.destroy_process_group()
else:
    loopback.run(WORKERS, minimize)
