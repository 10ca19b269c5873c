"""One rank's way to train a model together with the other ranks."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.errors import LimitError
from gradwire_lab.train.records import StepCosts

if TYPE_CHECKING:
    from gradwire.torch import GradwireState, LocalSteps, ShardedOptimizer


def seed_dropout(seed: int, step: int, worker: int) -> None:
    """Every codec drops the same values: those after torch.manual_seed, which takes half a
    millisecond where there is no GPU, and keeps a stack of every call for the day that one is."""
    drawn = int(np.random.SeedSequence([seed, step, worker]).generate_state(1)[0])
    torch.default_generator.manual_seed(drawn)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(drawn)


class Strategy:
    """One rank's way to train a model together with the other ranks.

    source: the part of gradwire that exchanges and keeps the statistics, if there is one. forward:
    called in the model's place, such as DDP around it. clip: largest norm of the gradient before
    the optimizer's step; 0: any. every: steps whose gradients are summed before the optimizer's.
    takes_over_servers_model: whether `close` gives the model the values that servers keep.
    loss_scale: by which the loss is multiplied for the gradient.
    """

    takes_over_servers_model = False
    loss_scale = 1.0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        source: GradwireState | LocalSteps | ShardedOptimizer | None = None,
        forward: nn.Module | None = None,
        clip: float = 0.0,
        every: int = 1,
    ) -> None:
        self.optimizer = optimizer
        self._model = model
        self._source = source
        self._forward = model if forward is None else forward
        self._clip = clip
        self._every, self._steps = every, 0

    def take_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Computes the gradient of this rank's batch, exchanges, and changes the model. Returns
        the loss before the change."""
        if self._steps % self._every == 0:
            self.optimizer.zero_grad()
        loss = functional.cross_entropy(self._forward(inputs), targets)
        (loss * self.loss_scale).backward()
        self._steps += 1
        if self._steps % self._every:
            return loss.detach()
        if self._clip > 0.0:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self.optimizer.step()
        return loss.detach()

    def steps_done(self, step: int) -> int:
        """How many steps of the run are done after this rank took `step`, counted from 0. If the
        other ranks went on without it, this is more than step + 1."""
        return step + 1

    def last_costs(self) -> StepCosts | None:
        """The costs of the last step; None where they are unknown."""
        if self._source is None:
            return None
        if self._steps % self._every:
            return StepCosts(0, 0, 0.0, 0.0)
        step = self._source.last_step()
        return StepCosts(**{cost.name: step[cost.name] for cost in fields(StepCosts)})

    def stats(self) -> dict[str, Any] | None:
        """Sums over all steps, named as in gradwire.torch.Stats; None where they are unknown."""
        return None if self._source is None else self._source.stats().as_dict()

    def settle(self) -> None:
        """Waits until the model has all changes of the last step."""

    def finish(self) -> None:
        """Brings the workers' models together after their last step. All call it, maybe twice."""
        self.settle()

    def weights(self) -> list[Tensor]:
        """The parameters to evaluate, in the order of the model's."""
        self.settle()
        return [parameter.detach() for parameter in self._model.parameters()]

    def snapshot(self, weights: list[Tensor]) -> nn.Module:
        """A copy of the model with these parameters and its own buffers."""
        copied = copy.deepcopy(self._model)
        with torch.no_grad():
            for parameter, weight in zip(copied.parameters(), weights, strict=True):
                parameter.copy_(weight)
        return copied

    @property
    def limit_error(self) -> LimitError | None:
        """The error if the last step ended because no codecs keep the limit of an `auto` text. It
        comes on all ranks in the same step."""
        error = None if self._source is None else self._source.error
        return error if isinstance(error, LimitError) else None

    def explain(self, error: BaseException) -> BaseException:
        """The error to show for an error in a step; it names the ranks that are gone."""
        return error if self._source is None else self._source.explain(error)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
