"""`ShardedOptimizer`: gradients summed in shards, each stepped by its owner alone, both compressed.

    push  every rank encodes each shard of its gradients for the owner (with a residual)
    step  the owner averages and lets the wrapped optimizer step its shard
    pull  the owner encodes the change of its shard once (with a residual), everyone applies the
          same bytes

Optimizer states exist once in the job: a rank holds those of about n / N of the n values. Beside
them it keeps the exact values of its shard (4 n / N bytes), the bucket (4 n), the residuals (4 n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.torch import checkpoint
from gradwire.torch.coding import RAW, make_coding
from gradwire.torch.replica import Replica, name_parameters, refuse_gradient_scaler
from gradwire.torch.session import check_timeout
from gradwire.torch.shard import Options, Shard, check_optimizer, options_of
from gradwire.torch.stats import Stats


class ShardedOptimizer(Optimizer):
    """Wraps an optimizer of one process and keeps its interface.

        optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        ...
        loss.backward()
        optimizer.step()

    For a plain module, not in DistributedDataParallel: `step` averages the gradients. Every rank
    must construct it, step it and load it alike; on construction the ranks compare settings and
    tensors, and take over rank 0's parameters and buffers. Buffers are not exchanged after that.

    optimizer      a torch.optim optimizer that steps every element for itself and has taken no
                   step; from now on it belongs to this one and steps this rank's shard. Its options
                   are read from `param_groups` of this one at each step: schedulers go there
    model          gives the parameters their names, which rules and errors speak of
    codec ... timeout   as in GradwireState

    A parameter without a gradient counts as one with a zero gradient: momentum and weight decay go
    on. Where a codec keeps a residual the owner holds the exact values of its shard, and what the
    replicas lack is in the residual; otherwise it takes over what everyone got.

    A gradient that is not finite on any rank: no rank changes a parameter, a NonFiniteStepWarning
    names it, stats().skipped_steps counts it, residuals are kept. (Finite gradients whose sum
    overflows are skipped, too; but the owners of the other shards have stepped: their residuals
    hold it.) Raises the errors of GradwireState in `step`; after one no step can be taken.
    """

    # So that a GradScaler calls `step`, which refuses it, whatever the gradients are.
    _step_supports_amp_scaling = True
    _complete = False

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        codec: str = "3lc:s=1.75",
        *,
        pull_codec: str | None = None,
        rules: Sequence[tuple[str, ...]] = (),
        exclude: Sequence[str] = (),
        min_numel: int = 256,
        process_group: dist.ProcessGroup | None = None,
        threads: int = 1,
        target: str = "auto",
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        check_timeout(timeout)
        check_optimizer(optimizer)
        named = name_parameters(optimizer, model)
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._complete = True
        self._shard = Shard(optimizer)
        coding = make_coding(
            process_group,
            codec=codec,
            pull_codec=pull_codec,
            rules=rules,
            exclude=exclude,
            min_numel=min_numel,
            threads=threads,
            target=target,
            seed=seed,
            # Not of this object: the replica's finalizer would hold it.
            update=self._shard.update,
        )
        self._replica = Replica(named, model, coding, process_group, timeout)
        self._replica.follow_rank_0(
            [
                f"sharded {type(optimizer).__name__}",
                *(f"group {options}" for options in options_of(self.param_groups)),
            ]
        )
        rank = self._replica.rank
        layout = coding.layout(self._replica.tensors, self._replica.world_size, RAW, raw=False)
        exchange = coding.make_exchange(layout, rank)
        self._marks_non_finite = exchange.keeps_residuals
        self._shard.take(named, layout, exchange, self._replica.bucket, rank)
        self.state = optimizer.state
        self._handed_over = options_of(optimizer.param_groups)
        self._steps = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once it is constructed: which rank owns what is settled then."""
        if self._complete:
            raise RuntimeError(
                "a ShardedOptimizer takes no further parameters: make a new one, of an optimizer "
                "with all of them"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages the gradients and steps the model on all ranks; returns the closure's loss."""
        refuse_gradient_scaler(self)
        if self.error is not None:
            raise self.error
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_over_options()
        replica = self._replica
        for parameter, part in zip(replica.parameters, replica.parts, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)
        fault = None if self._marks_non_finite else replica.find_non_finite()
        if fault is not None:
            replica.bucket.fill_(torch.nan)  # for every owner: none may step
        finite = replica.exchange(self._steps, fault)
        self._steps += 1
        if finite:
            for parameter, part in zip(replica.parameters, replica.parts, strict=True):
                parameter.add_(part)
        self._shard.follow()
        return loss

    @property
    def error(self) -> Exception | None:
        """What ended the communication; after it no step can be taken."""
        return self._replica.error

    def stats(self) -> Stats:
        """Sums over all steps of this rank, and what goes raw and why."""
        return self._replica.stats()

    def last_step(self) -> dict[str, Any]:
        """Bytes and times of this rank's last step, as GradwireState.last_step()."""
        return self._replica.last_step()

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer states with a value for each element."""
        return self._shard.state_bytes()

    def explain(self, error: BaseException) -> BaseException:
        """As GradwireState.explain."""
        return self._replica.explain(error)

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's shard, residuals and the groups' options; every rank saves its own.

        The model's parameters are to be saved beside it; they are equal on all ranks.
        """
        return {
            **self._replica.state_dict(self._steps),
            "shard": self._shard.state_dict(),
            "options": options_of(self.param_groups),
        }

    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, and the model's parameters.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError if it was saved
        by another rank, for another world size, codec or model.
        """
        self._replica.check_state(state)
        if len(state["options"]) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(state['options'])} groups, this one {len(self.param_groups)}"
            )
        self._shard.load_state_dict(state["shard"])
        self._replica.load_state_dict(state)
        self._steps = int(state["iterations"])
        self.state = self._shard.optimizer.state
        for group, options in zip(self.param_groups, state["options"], strict=True):
            group.update(options)
        self._handed_over = options_of(self._shard.optimizer.param_groups)

    def close(self) -> None:
        """Ends the communication; happens by itself at exit, and when nobody refers to this."""
        self._replica.close()

    def _hand_over_options(self) -> None:
        groups = self._shard.optimizer.param_groups
        if not _same(options_of(groups), self._handed_over):
            raise RuntimeError(
                "the options of the wrapped optimizer were changed; those of the ShardedOptimizer "
                "count: give schedulers that one"
            )
        self._handed_over = options_of(self.param_groups)
        for group, options in zip(groups, self._handed_over, strict=True):
            group.update(options)


def _same(a: Options, b: Options) -> bool:
    """Tensors, which may be learning rates, are the same if they are one object."""
    return all(
        mine.keys() == theirs.keys()
        and all(
            value is theirs[key] or (not isinstance(value, torch.Tensor) and value == theirs[key])
            for key, value in mine.items()
        )
        for mine, theirs in zip(a, b, strict=True)
    )
