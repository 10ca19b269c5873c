"""Several optimizers of one model, as one: Muon for its matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

Optimizers = Optimizer | Sequence[Optimizer]


def parts_of(optimizer: Optimizers) -> list[Optimizer]:
    """The optimizers that are given as one."""
    if isinstance(optimizer, OptimizerList):
        return list(optimizer.parts)
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def each_parameter(
    optimizer: Optimizers,
) -> Iterator[tuple[Optimizer, dict[str, Any], torch.Tensor]]:
    """All parameters in the order of the groups, each with the part and the group that step it."""
    for part in parts_of(optimizer):
        for group in part.param_groups:
            for parameter in group["params"]:
                yield part, group, parameter


def is_of_pytorch(optimizer: Optimizer) -> bool:
    """Whether its class is PyTorch's own, and no subclass of such a one."""
    return type(optimizer).__module__.startswith("torch.optim.")


def name_of(optimizer: Optimizers) -> str:
    """As errors, statistics and states call it: "AdamW", or "Muon and AdamW"."""
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))


class OptimizerList(Optimizer):
    """Steps each of its parts.

    Groups and states are those of the parts, one after the other.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """Raises ValueError for a parameter that two parts step, and for LBFGS, whose step computes
        gradients that the others would not see."""
        self.parts = tuple(parts)
        seen: set[int] = set()
        for part in parts:
            if isinstance(part, LBFGS):
                raise ValueError("LBFGS computes gradients in its step: give it a model of its own")
            mine = {id(p) for group in part.param_groups for p in group["params"]}
            if seen & mine:
                raise ValueError(
                    f"the {type(part).__name__} and an optimizer before it in the list step the "
                    "same parameter: give each parameter to one"
                )
            seen |= mine
        self.defaults = {}
        self.__setstate__({})  # makes what Optimizer.__init__ makes, beside groups and state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] # the parts have them
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> _States:  # type: ignore[override] # the parts have it
        return _States(self.parts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates the closure once, and steps all parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of each part, in `parts`."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for the state of another number of parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


class _States(MutableMapping[torch.Tensor, Any]):
    """The states of the parts, by parameter."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._states = [part.state for part in parts]

    def _of(self, parameter: torch.Tensor) -> Any:
        for state in self._states:
            if parameter in state:
                return state
        raise KeyError(parameter)

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: torch.Tensor, entry: Any) -> None:
        self._of(parameter)[parameter] = entry

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for state in self._states for parameter in state)

    def __len__(self) -> int:
        return sum(map(len, self._states))
