"""Finds weights in an optimizer's state, which local steps would not exchange."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.optim import ASGD, Optimizer

from gradwire.torch.optimizer_list import is_of_pytorch, parts_of
from gradwire.torch.optimizers.fragment import Fragment
from gradwire.torch.parameters import ordinary_tensors
from gradwire.torch.tensor_memory import local_of
from gradwire.torch.wrapping_optimizer import describe_weights

_NEAR = 0.1  # of the parameters' norm; momenta and moments are as far as the parameters are long


class WeightsWatch:
    """Looks, in the first steps, for weights in the optimizer's state, which are not exchanged.

    Schedule-free optimizers, Lookahead, averages of weights and master copies of 16-bit weights
    keep them: each rank would go on with its own, or put them into its model in the end.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], fragments: int
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        # Twice: at the first look, a copy of the parameters may still be just these. PyTorch's own
        # optimizers keep no weights, but a moment may lie close to them by chance.
        keeps_none = all(is_of_pytorch(p) and type(p) is not ASGD for p in parts_of(optimizer))
        self._looks = 0 if keeps_none else 2 * fragments

    def look(self, fragments: Sequence[Fragment]) -> None:
        """After a step with gradients. Raises ValueError for weights in the optimizer's state."""
        begun = [fragment for fragment in fragments if fragment.steps == 1]
        if not begun or not self._looks:
            return
        self._looks -= 1
        for fragment in begun:
            parameters = [self._parameters[place] for place in fragment.places]
            with fragment.anchors_at_hand(change=False):
                key = _find_weights(self._optimizer, parameters, fragment.anchors)
            if key:
                raise ValueError(describe_weights(self._optimizer, "LocalSteps", repr(key)))


@ordinary_tensors()
def _find_weights(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor]
) -> str | None:
    """The entry of the parameters' states that is close to the parameters; None if there is none.

    before: the parameters before the last step. A copy of just these is no weight of the optimizer,
    nor are the parameters themselves: sharpness-aware minimization has such entries.
    """
    distances: defaultdict[str, float] = defaultdict(float)
    norms: defaultdict[str, float] = defaultdict(float)
    for parameter, old in zip(parameters, before, strict=True):
        for key, kept in optimizer.state.get(parameter, {}).items():
            values = local_of(kept) if isinstance(kept, torch.Tensor) else kept
            # (States in 8 bits are of classes of their own, which need not know how to compare.)
            if values.__class__ not in (torch.Tensor, torch.nn.Parameter):
                continue
            if values.layout != old.layout or values.shape != old.shape:
                continue
            if torch.equal(values.float(), old):
                continue
            if values.data_ptr() == local_of(parameter).data_ptr():
                continue
            distances[key] += float((values - old).norm()) ** 2
            norms[key] += float(old.norm()) ** 2
    near = [key for key in norms if distances[key] <= _NEAR**2 * norms[key]]
    return next((key for key in near if norms[key] > 0), None)
