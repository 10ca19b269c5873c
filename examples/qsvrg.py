"""QSVRG on L2-regularized logistic regression: a linear rate with compressed exchanges.

torchrun --nproc-per-node 4 examples/qsvrg.py

Without torchrun, one process plays the four workers and computes the same numbers.
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional

from gradwire.contrib.qsvrg import QSVRG

WORKERS, EXAMPLES, FEATURES, REGULARIZATION = 4, 400, 96, 0.05

torch.manual_seed(0)  # all ranks make the same data, and each takes its share
inputs = functional.normalize(torch.randn(EXAMPLES, FEATURES))
labels = (inputs @ torch.randn(FEATURES)).sign()
mine = slice(0, EXAMPLES)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    share = EXAMPLES // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)

weight = torch.nn.Parameter(torch.zeros(FEATURES))


def loss_of(chosen: slice | torch.Tensor, rows: slice = mine) -> torch.Tensor:
    margins = labels[rows][chosen] * (inputs[rows][chosen] @ weight)
    return functional.softplus(-margins).mean() + REGULARIZATION * weight.square().sum() / 2


optimizer = QSVRG(
    [weight],
    loss_of,
    len(inputs[mine]),
    smoothness=0.25 + REGULARIZATION,  # |input| = 1, so a function's gradient is 1/4-Lipschitz
    convexity=REGULARIZATION,
    workers=None if dist.is_initialized() else WORKERS,
)
for epoch in range(4):
    done = optimizer.epoch()
    gradient = torch.autograd.grad(loss_of(slice(None), slice(None)), weight)[0]
    if not dist.is_initialized() or dist.get_rank() == 0:
        bits = done.update_bits / done.steps / FEATURES
        print(
            f"epoch {epoch + 1}: |gradient| {float(gradient.norm()):.2e}, {done.steps} steps, "
            f"{bits:.2f} bits a value"
        )
if dist.is_initialized():
    dist.destroy_process_group()
