"""How much larger a rank's own gradient is than the average of all, because of its noise.

An adaptive optimizer divides by the root of the second moment that it sees. Where every rank steps
its own optimizer and the *updates* are averaged, this is the moment of the rank's own gradient:
that of the average gradient, and the noise of a small batch. So the average update is too small, by
a factor that differs from tensor to tensor:

    gain = sqrt(power of a rank's gradient / power of the average gradient) >= 1

The power of a rank's own gradient is known there. The power of the average is estimated: each rank
sends a few random signed sums of every tensor's gradient, which the exchange averages, and the
expected square of a signed sum of the average gradient is its power. (This is the sketch of Alon,
Matias and Szegedy 1996; that the two powers differ by the noise is from McCandlish et al. 2018,
arXiv:1812.06162, appendix A.)

Decoupled weight decay is a part of the change that does not depend on the gradient, so
`correct_changes` multiplies the rest alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Adafactor, AdamW, Muon, Optimizer

from gradwire.torch.optimizer_list import parts_of
from gradwire.torch.parameters import ordinary_tensors

SUMS = 4  # signed sums of a tensor in a step; more than the memory makes up for
_MEMORY = 0.99  # of the averages of powers: they are over about the last 100 exchanges
_OFFSETS, _STRIDE = 1021, 389  # a step's signs begin at one of these places, the next far from it

_DECOUPLED = (Adafactor, AdamW, Muon)  # they always decay decoupled

Gradients = Sequence[torch.Tensor | None]  # dense, in the order of the tensors; None: zeros


class GradientNoise:
    """The powers of the gradients of some tensors, as averages over the last exchanges.

    Every rank must be given the same tensors, and call `sketch` and `update` alike.

    power   f64 (2, tensors): of the rank's own gradient, and of the average gradient
    """

    @ordinary_tensors()
    def __init__(
        self, numels: Sequence[int], world_size: int, device: torch.device | str = "cpu"
    ) -> None:
        """device: of the gradients."""
        generator = torch.Generator(device="cpu").manual_seed(0)
        length = max((-(-numel // SUMS) for numel in numels), default=0) * SUMS + _OFFSETS
        draws = torch.randint(2, (length,), generator=generator, dtype=torch.int64, device="cpu")
        self._signs = draws.mul_(2).sub_(1).float().to(device)
        self.world_size = world_size
        self._updates = 0
        self.power = torch.zeros(2, len(numels), dtype=torch.float64, device="cpu")
        self._own = torch.zeros_like(self.power[0])  # at the last `sketch`

    @property
    def device(self) -> torch.device:
        """Of the gradients."""
        return self._signs.device

    @property
    def numel(self) -> int:
        """The length of a sketch."""
        return SUMS * self.power.shape[1]

    @ordinary_tensors()
    def sketch(self, gradients: Gradients, sketch: torch.Tensor, norms: Sequence[float]) -> None:
        """Writes this rank's signed sums into `sketch`, f32 (numel,), to be averaged over the
        ranks. norms: of the gradients."""
        offset = self._updates * _STRIDE % _OFFSETS
        sketch.zero_()
        own = list(map(_wide_norm, gradients, norms))  # one more norm where there are no tensors
        self._own.copy_(torch.tensor([n**2 for n in own], dtype=torch.float64, device="cpu"))
        for gradient, sums in zip(gradients, sketch.view(-1, SUMS), strict=True):
            if gradient is None:
                continue
            numel = gradient.numel()
            signed = gradient.reshape(-1).float() * self._signs[offset : offset + numel]
            whole = numel - numel % SUMS
            sums += signed[:whole].view(-1, SUMS).sum(dim=0)
            sums[: numel - whole] += signed[whole:]

    @ordinary_tensors()
    def update(self, average: torch.Tensor) -> None:
        """Takes in the average of all ranks' sketches, f32 (numel,), after each `sketch`."""
        seen = torch.stack([self._own, average.double().view(-1, SUMS).square().sum(dim=1)])
        self.power.mul_(_MEMORY).add_(seen, alpha=1.0 - _MEMORY)
        self._updates += 1

    @ordinary_tensors()
    def follow(self, other: dict[str, Any]) -> None:
        """Does what `update` did on another rank, whose state afterwards is `other`."""
        if int(other["updates"]) == self._updates:
            return
        self._updates = int(other["updates"])
        self.power[0].mul_(_MEMORY).add_(self._own, alpha=1.0 - _MEMORY)
        self.power[1].copy_(other["power"][1])

    def gains(self) -> list[float]:
        """One for each tensor, from 1 to the root of the number of ranks; 1 before any update."""
        own, average = self.power
        ratio = torch.where(average > 0, own / average, 1.0)
        # The machines' roots of tensors differ in the last bit; these do not.
        return [math.sqrt(value) for value in ratio.clamp_(1.0, self.world_size).tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "power": self.power.clone(), "own": self._own.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state of other tensors."""
        if state["power"].shape != self.power.shape:
            raise ValueError(
                f"gradient noise: the state has {state['power'].shape[1]} tensors, this rank has "
                f"{self.power.shape[1]}"
            )
        self._updates = int(state["updates"])
        self.power.copy_(state["power"])
        self._own.copy_(state["own"])


def _wide_norm(gradient: torch.Tensor | None, norm: float) -> float:
    """The norm, also where it overflowed in float32 though the gradient is finite."""
    if gradient is None or not math.isinf(norm):
        return norm
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).item()


@ordinary_tensors()
def average_norm(
    noises: Sequence[GradientNoise], gradients: Gradients, shards: dist.ProcessGroup | None = None
) -> float:
    """The norm of the average gradient, estimated from this rank's own gradient: its norm now, and
    by how much the average was smaller in the last exchanges. noises: of all the tensors. shards:
    the ranks that have the other parts of the tensors; all of them must call this."""
    powers = torch.stack([noise.power.sum(dim=1) for noise in noises]).sum(dim=0)
    now = powers.new_tensor([sum(norm**2 for norm in norms_of(gradients).cpu().tolist())])
    sums = torch.cat([now, powers])
    if shards is not None:
        sums = sums.to(noises[0].device)  # where their group can sum
        dist.all_reduce(sums, group=shards)
    power, own, average = sums.cpu().tolist()
    share = average / own if own > 0 else 1.0
    return math.sqrt(power * min(max(share, 1.0 / noises[0].world_size), 1.0))


def count_decay(optimizer: Optimizer, kept: list[float], has_gradient: Sequence[bool]) -> None:
    """After a step of the optimizer: multiplies the entry of each of its parameters by the share of
    the values that decoupled weight decay has kept. A parameter without a gradient is not decayed.
    """
    parameters = 0
    groups = ((part, group) for part in parts_of(optimizer) for group in part.param_groups)
    for part, group in groups:
        if isinstance(part, _DECOUPLED) or group.get("decoupled_weight_decay"):
            share = 1.0 - float(group["lr"]) * group["weight_decay"]
            for index in range(parameters, parameters + len(group["params"])):
                if has_gradient[index]:
                    kept[index] *= share
        parameters += len(group["params"])


def correct_changes(
    changes: Iterable[torch.Tensor],
    anchors: Iterable[torch.Tensor],
    gains: Iterable[float],
    kept: Iterable[float],
) -> None:
    """Multiplies each change by its gain, in place, but for decoupled weight decay.

    kept: the shares of the anchors that this decay has kept since, see count_decay
    """
    for change, anchor, gain, share in zip(changes, anchors, gains, kept, strict=True):
        # change = decayed + rest, where decayed = (1 - share) * anchor
        change.mul_(gain).sub_(anchor, alpha=(gain - 1.0) * (1.0 - share))


def norms_of(gradients: Gradients) -> torch.Tensor:
    """Of each, f32 (tensors,), where the gradients are."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients if g is not None]
    zero = norms[0].new_zeros(()) if norms else torch.zeros((), dtype=torch.float32, device="cpu")
    found = iter(norms)
    return torch.stack([zero if g is None else next(found) for g in gradients] or [zero])
