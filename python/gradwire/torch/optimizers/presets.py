"""Settings of LocalSteps that papers describe."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from gradwire.torch.optimizers.fragment import OuterFactory


def like(optimizer: Optimizer) -> OuterFactory:
    """Makes optimizers of its class with its options.

    Raises:
        ValueError: Its groups have several options, and a fragment has one group.
    """
    if len(optimizer.param_groups) != 1:
        raise ValueError(
            f"outer is a {type(optimizer).__name__} with {len(optimizer.param_groups)} groups of "
            "parameters, and has one in a fragment: give a function that makes an optimizer for a "
            "list of parameters"
        )
    options = optimizer.param_groups[0]

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made = type(optimizer).__new__(type(optimizer))
        groups = [{**options, "params": parameters}]
        state: defaultdict[Any, Any] = defaultdict(dict)
        made.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": groups})
        return made

    return make


def outer_nesterov(lr: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """DiLoCo's outer optimizer (Douillard et al. 2023, arXiv:2311.08105): SGD with Nesterov
    momentum, with the values that its authors found best."""
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


def sparse_loco(density: float = 0.02, decay: float = 0.95, lr: float = 1.0) -> dict[str, Any]:
    """SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706), as arguments of LocalSteps:

        LocalSteps(adamw, model, every=30, **sparse_loco())

    A rank adds its changes to its residual, sends the largest of each 4096 values in 2 bits, and
    keeps `decay` times the rest, which takes the place of an outer momentum. Every rank receives
    what each other rank sends (the exchange broadcast), so that nothing is compressed twice.

    density   the share of the values that is sent; the paper has 0.01 to 0.03
    decay     of the residuals, in (0, 1]
    lr        by which the average is multiplied
    """
    return {
        "codec": f"topk2bit:density={density}",
        "exchange": "broadcast",
        "residual_decay": decay,
        "outer": lambda parameters: SGD(parameters, lr=lr),
    }
