"""DiLoCo with the names and the form that torchft has given it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.local_schedule import Schedule
from gradwire.option_record import explains_arguments
from gradwire.torch.checkpoint import StateDict
from gradwire.torch.optimizer_list import Optimizers, name_of, parts_of
from gradwire.torch.optimizers.local_rules import OuterFactory
from gradwire.torch.optimizers.local_stats import LocalStats
from gradwire.torch.optimizers.local_steps import LocalSteps
from gradwire.torch.options import Compression, Execution
from gradwire.torch.shared_parameters import ModuleHook, remove_hooks, remove_hooks_of

# As errors of LocalSteps call its arguments, and as they are called here.
_NAMES = {
    "every": "sync_every",
    "delay": "fragment_sync_delay",
    "mix": "fragment_update_alpha",
    "outer": "outer_optimizer",
}
_NAMED = re.compile(rf"\b({'|'.join(_NAMES)})(?= is |=|: the state)")


class DiLoCo:
    """A context in which the inner optimizer's steps are those of a LocalSteps.

        with DiLoCo(model, adamw, outer, sync_every=30, codec="int8"):
            for batch in batches:
                adamw.zero_grad()
                loss(model, batch).backward()
                adamw.step()  # every 30th step exchanges

    DiLoCo (Douillard et al. 2023, arXiv:2311.08105) and Streaming DiLoCo (Douillard et al. 2025,
    arXiv:2501.18512), as torchft's class `DiLoCo` takes them, without its manager. Leaving the
    context exchanges what was not sent, so that all ranks' models are equal, unless an exception
    leaves it. A GradScaler leaves out steps of single ranks: with one, use LocalSteps.

    Args:
        model: A plain module, equal parameters on all ranks afterwards.
        inner_optimizer: Of its parameters. You step it inside the context. Of several in a list,
            each steps once in a step, in any order.
        outer_optimizer: Any optimizer of the model's parameters, whose class and options are taken,
            also as a scheduler changes them, or a function that makes one of a list of parameters.
            Its state is in that of `optimizer`.
        sync_every: Steps from one exchange of a fragment to the next.
        fragments: Parts of the model, whose exchanges take turns.
        fragment_sync_delay: Steps during which an exchange travels. It begins so many steps before
            its turn, as torchft's does, and its update arrives at its turn.
        fragment_update_alpha: Share of a rank's own values in the parameters after an exchange.
        codec: As text. None: "raw", or with `gate` one that sends exactly what it lets through.
        gate: As in Schedule: with "bfloat16" it is PULSELoCo. None: a rank sends all its changes.
        process_group: None: the default group.
        compression: Further options of what is sent.
        execution: Threads, seed, timeout.

    Attributes:
        optimizer: The LocalSteps that exchanges.
    """

    @explains_arguments
    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizers,
        outer_optimizer: Optimizer | OuterFactory,
        sync_every: int,
        *,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        codec: str | None = None,
        gate: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        compression: Compression = Compression(),
        execution: Execution = Execution(),
    ) -> None:
        with _in_these_names():
            self.optimizer = LocalSteps(
                inner_optimizer,
                model,
                codec or (None if gate else "raw"),
                outer=outer_optimizer,
                process_group=process_group,
                compression=compression,
                schedule=Schedule(
                    sync_every,
                    fragments,
                    fragment_sync_delay,
                    mix=fragment_update_alpha,
                    gate=gate or "",
                ),
                execution=execution,
            )
        self.optimizer._let_user_step()
        self._parts = parts_of(inner_optimizer)
        self._stepped: list[Optimizer] = []  # in the step under way
        self._is_entered = False
        self._handles: list[RemovableHandle] = []
        remove_hooks_of(self, self._handles)
        for part in self._parts:
            self._handles.append(part.register_step_pre_hook(ModuleHook(self._before_step)))
            self._handles.append(part.register_step_post_hook(ModuleHook(self._after_step)))

    def __enter__(self) -> DiLoCo:
        """Raises RuntimeError where it was entered before."""
        if self._is_entered:
            raise RuntimeError(
                "this DiLoCo was entered before, and its exchanges end with that context: make a "
                "new one, and load the state_dict() of this one to go on"
            )
        self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        remove_hooks(self._handles)
        try:
            if error is None:
                if self._stepped:
                    self._refuse_half_step("the context was left")
                self.optimizer.synchronize()
        finally:
            self.optimizer.close()

    def _before_step(self, part: Optimizer, *_: Any) -> None:
        if not self._is_entered:
            raise RuntimeError(
                f"{name_of(part)} was stepped outside of the DiLoCo that exchanges its steps: "
                "step it inside `with` of that"
            )
        if part in self._stepped:
            self._refuse_half_step(f"{name_of(part)} was stepped again")
        if not self._stepped:
            self.optimizer._begin_step()

    def _after_step(self, part: Optimizer, *_: Any) -> None:
        self._stepped.append(part)
        if len(self._stepped) == len(self._parts):
            self._stepped.clear()
            self.optimizer._end_step()

    def _refuse_half_step(self, what: str) -> None:
        missing = name_of([part for part in self._parts if part not in self._stepped])
        raise RuntimeError(
            f"{what} before {missing} was stepped: step each optimizer of the list once, then the "
            "next step begins"
        )

    @property
    def local_steps(self) -> int:
        """As LocalSteps.local_steps."""
        return self.optimizer.local_steps

    def stats(self) -> LocalStats:
        """As LocalSteps.stats."""
        return self.optimizer.stats()

    def state_dict(self) -> StateDict:
        """As LocalSteps.state_dict, with the inner optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """As LocalSteps.load_state_dict."""
        with _in_these_names():
            self.optimizer.load_state_dict(state)


@contextmanager
def _in_these_names() -> Iterator[None]:
    """Errors inside say the names of DiLoCo's arguments for those of LocalSteps."""
    try:
        yield
    except (ValueError, TypeError) as error:
        said = _NAMED.sub(lambda found: _NAMES[found[1]], str(error))
        if said == str(error):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(said) from None
