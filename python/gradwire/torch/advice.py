"""`advise`: whether compression pays for this training, on these links."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from gradwire.errors import missing
from gradwire.torch.optimizer_list import Optimizers


def advise(
    model: nn.Module,
    step: Callable[[nn.Module], Any],
    optimizer: Optimizers | None = None,
    **options: Any,
) -> Any:
    """Predicts what a step of this training would take with each codec and exchange.

        advice = gradwire.torch.advise(
            model, lambda module: loss_of(module(inputs), targets).backward(), adamw
        )
        if dist.get_rank() == 0:
            advice.show()

    Every rank of the process group, whose tensors are on the CPU, calls it together before the
    training. It takes some steps without any exchange, times the codecs on their gradients,
    measures the links between the ranks, and takes steps with DDP and with gradwire. The model's
    parameters and buffers are then as before.

    Args:
        model: Plain, before DistributedDataParallel or LocalSteps.
        step: Computes the loss with the module that it is given, and its gradients.
        optimizer: Decides between the hook and LocalSteps. None: the hook.
        options: `steps` to take (10), `codecs` to compare, `every` (1; above: LocalSteps that
            exchange every so many steps), `ranks_per_machine`.

    Returns:
        A gradwire_lab.plan.here.Advice: the table of `gradwire plan`, and lines to paste.

    Raises:
        ModuleNotFoundError: gradwire-lab, which has the model of time, is not installed.
        PlanError: There is one rank, too few steps, a parameter that got no gradient, or no
            optimizer for `every`.
        ValueError: `every` is below 1.
    """
    try:
        here = importlib.import_module("gradwire_lab.plan.here")
    except ModuleNotFoundError as error:
        lacking = missing("gradwire-lab, which has the model of time, is", "./lab")
        raise ModuleNotFoundError(lacking, name=error.name) from error
    return here.advise(model, step, optimizer, **options)
