"""DiLoCo with the names and the form that torchft has given it."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.local_schedule import Schedule
from gradwire.torch.checkpoint import StateDict
from gradwire.torch.optimizer_list import Optimizers, parts_of
from gradwire.torch.optimizers.local_rules import OuterFactory
from gradwire.torch.optimizers.local_stats import LocalStats
from gradwire.torch.optimizers.local_steps import LocalSteps
from gradwire.torch.options import Compression, Execution


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
        inner_optimizer: Of its parameters, or several in a list. You step it.
        outer_optimizer: Any optimizer of the model's parameters, whose class and options are taken,
            or a function that makes one of a list of parameters.
        sync_every: Steps from one exchange of a fragment to the next.
        fragments: Parts of the model, whose exchanges take turns.
        fragment_sync_delay: Steps during which an exchange travels.
        fragment_update_alpha: Share of a rank's own values in the parameters after an exchange.
        codec: As text.
        process_group: None: the default group.
        compression: Further options of what is sent.
        execution: Threads, seed, timeout.

    Attributes:
        local_steps: The LocalSteps, with its statistics.
    """

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
        codec: str = "raw",
        process_group: dist.ProcessGroup | None = None,
        compression: Compression = Compression(),
        execution: Execution = Execution(),
    ) -> None:
        self.local_steps = LocalSteps(
            inner_optimizer,
            model,
            codec,
            outer=outer_optimizer,
            process_group=process_group,
            compression=compression,
            schedule=Schedule(
                sync_every, fragments, fragment_sync_delay, mix=fragment_update_alpha
            ),
            execution=execution,
        )
        self.local_steps._let_user_step()
        self._parts = parts_of(inner_optimizer)

    def __enter__(self) -> DiLoCo:
        # The first of several begins a step, and the last one ends it.
        begin = self._parts[0].register_step_pre_hook(lambda *_: self.local_steps._begin_step())
        end = self._parts[-1].register_step_post_hook(lambda *_: self.local_steps._end_step())
        self._handles = [begin, end]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        try:
            if error is None:
                self.local_steps.synchronize()
        finally:
            self.local_steps.close()

    def stats(self) -> LocalStats:
        """As LocalSteps.stats."""
        return self.local_steps.stats()

    def state_dict(self) -> StateDict:
        """As LocalSteps.state_dict, with the inner optimizer's state."""
        return self.local_steps.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """As LocalSteps.load_state_dict."""
        self.local_steps.load_state_dict(state)
