"""Weights that an optimizer keeps in its state, which LocalSteps would not exchange.

Schedule-free optimizers, Lookahead, averages of weights and master copies of 16-bit weights keep
them: each rank would go on with its own, or put them into its model in the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from gradwire.torch.records.modes import ordinary_tensors
from gradwire.torch.records.parameters import local_of

_NEAR = 0.1  # of the parameters' norm; momenta and moments are as far as the parameters are long


@ordinary_tensors()
def find_weights(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
) -> str | None:
    """The entry of the parameters' states that is close to the parameters; None if there is none.

    before: the parameters before the last step. A copy of just these is no weight of the optimizer,
    nor are the parameters themselves: sharpness-aware minimization has such entries.
    """
    distances: defaultdict[str, float] = defaultdict(float)
    norms: defaultdict[str, float] = defaultdict(float)
    for parameter, old in zip(parameters, before, strict=True):
        for key, kept in optimizer.state.get(parameter, {}).items():
            values = local_of(kept) if isinstance(kept, torch.Tensor) else None
            if values is None or values.shape != old.shape or torch.equal(values.float(), old):
                continue
            if values.data_ptr() == local_of(parameter).data_ptr():
                continue
            distances[key] += float((values - old).norm()) ** 2
            norms[key] += float(old.norm()) ** 2
    near = [key for key in norms if distances[key] <= _NEAR**2 * norms[key]]
    return next((key for key in near if norms[key] > 0), None)
