"""`ShardedOptimizer`: the owner of each shard sums its gradients and steps it.

    push  every rank encodes each shard of its gradients for the owner (with a residual)
    step  the owner averages them and lets the wrapped optimizer step the shard
    pull  the owner encodes the change of the shard once (with a residual), and every rank applies
          the same bytes

Optimizer states exist once in the job: of n values and N ranks, a rank holds the states of about
n / N values. It also keeps the exact values of its shard (4 n / N bytes), the bucket (4 n bytes)
and the residuals (4 n bytes); of 16-bit parameters, their float32 values too (4 n bytes). Shard,
states and residuals are in the host's memory, where the owner steps, whatever device the model is
on; Execution(memory=) can put the residuals elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.option_record import explains_arguments
from gradwire.torch import checkpoint
from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.session import Session, SessionOwner
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.network.engine import Unused
from gradwire.torch.optimizers.replica import Replica, ReplicaBucket
from gradwire.torch.optimizers.shard import Shard, check_optimizer, keeps_residuals
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import (
    OptionsText,
    copy_gradient,
    options_of,
    ordinary_tensors,
    wide_of,
)
from gradwire.torch.staging.moves import checksums_of, overwrite
from gradwire.torch.staging.stage import HostedStage, stage_for
from gradwire.torch.stats import Stats
from gradwire.torch.wrapping_optimizer import (
    OptimizerWatch,
    WrappingOptimizer,
    copy_options,
    finer_codec,
    is_of_get_state_dict,
    refuse_get_state_dict,
    refuse_modes,
    refuse_several_gradients,
    require_optimizer,
    runs_hooks_of_loading,
    runs_hooks_of_saving,
    usual_push_codec,
)


class ShardedOptimizer(SessionOwner, WrappingOptimizer):
    """Wraps an optimizer of one process and keeps its interface.

        optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        ...
        loss.backward()
        optimizer.step()

    For a plain module, not in DistributedDataParallel: `step` averages the gradients. Every rank
    must construct, step and load it alike. On construction the ranks compare settings and tensors,
    and take over rank 0's parameters and buffers. Buffers are not exchanged after that.

    A parameter that no rank has a gradient of is not stepped, as by any optimizer of PyTorch; where
    some ranks have one, it counts as zeros on the others.

    If a codec keeps a residual, the owner holds the exact values of its shard, and the residual
    holds their difference from the replicas. Otherwise the owner takes over the replicas' values.

    If a gradient is not finite on any rank, no rank changes a parameter. A NonFiniteStepWarning
    names the rank, stats().skipped_steps counts the step, and residuals are kept. (If finite
    gradients have an infinite sum, the step is skipped, too. But the owners of other shards have
    stepped then, and their residuals hold the change.) `step` raises TypeError for a sparse
    gradient, and the errors of GradwireState; after one of the latter no step can be taken.

    An optimizer such as Adam, which divides by squares of gradients, learns too slowly from those
    that a coarse codec sends: the first step gives a CoarseGradientsWarning, as with the hook.

    Args:
        optimizer: A torch.optim optimizer that steps each element by itself and has taken no step.
            Until `close` it steps this rank's shard, and after it it has no state, as a new
            optimizer. It shares its groups with this one.
        model: Gives the parameters their names, which rules and errors mention.
        codec: As text. None: "safe" for an optimizer that divides by squares of gradients, "small"
            for any other.
        process_group: None: the default group.
        compression: Further options; no exchange but "sharded".
        execution: Threads, seed, timeout.
    """

    _session: Session

    @explains_arguments
    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        codec: str | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        compression: Compression = Compression(),
        execution: Execution = Execution(),
    ) -> None:
        require_optimizer(optimizer, "the second is the model")
        check_optimizer(optimizer)
        refuse_modes(optimizer, "ShardedOptimizer")
        refuse_several_gradients(optimizer, "ShardedOptimizer")
        exchange_settings = ExchangeSettings.of(
            compression.given(codec=codec),
            Members(process_group),
            execution,
            finer=partial(finer_codec, optimizer),
        )
        compression.require_sharded()
        replica = Replica("ShardedOptimizer", optimizer, model, exchange_settings)
        if replica.shards is not None:
            raise TypeError(
                "the model's parameters are DTensors, so its optimizer steps shards already: for "
                "fully_shard (FSDP2), FullyShardComm compresses what it sends"
            )
        self._replica = replica
        self._shard = shard = Shard(optimizer)
        # `update` is the shard's: the session would keep this object alive through its own method.
        replica.settings = replace(replica.settings, update=shard.update)
        self._stage = stage_for(replica.device, execution.memory, takes_kernels=False)
        session = self._session = Session(replica.settings, stage=HostedStage(self._stage))
        session.close_with(self)
        self._bucket = ReplicaBucket(replica.named, replica.device)
        self._options = OptionsText()
        name = f"sharded {type(optimizer).__name__}"
        replica.follow_rank_0(session, [name, self._options_text()])
        rank, world_size = session.rank, session.world_size
        layout = replica.settings.bucket_layout(self._bucket.tensors, world_size)
        self._marks_non_finite = world_size > 1 and keeps_residuals(layout)
        # Of 16-bit parameters, every rank keeps the values that are rounded to them.
        self._wide = [p if p.dtype == torch.float32 else wide_of(p) for p in replica.parameters]
        wide = dict(zip(replica.names, self._wide, strict=True))
        super().__init__(optimizer)  # last: until then an error leaves it to the user
        shard.take(dict(replica.named), wide, layout, rank, world_size, self._own_use)
        mine = [piece.values for piece in shard.pieces]
        self._optimizer_watch = OptimizerWatch(mine, usual_push_codec(layout), rank)
        self._own_use.refuse_saving()
        self._own_use.refuse_loading("load a state that a ShardedOptimizer saved into that one")
        self._steps = 0
        replica.shared.note_values()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages the gradients and steps the model, on all ranks. Returns the closure's loss."""
        if is_of_get_state_dict():
            return None  # it asks for the state then, which is refused
        if vars(self).pop("found_inf", None) is not None:
            vars(self).pop("grad_scale", None)
            raise RuntimeError(
                "ShardedOptimizer takes no GradScaler, which would skip steps on single ranks: "
                "train in float32 or bfloat16"
            )
        self._session.check()
        loss = self._evaluate(closure)  # which may change parameters, as a forward pass may
        self._replica.shared.check()
        if edited := self._replica.shared.edited():
            self._take_over(edited)
        self._exchange(asks=bool(edited))
        self._log(self._steps - 1)
        return loss

    @ordinary_tensors()
    def _take_over(self, edited: Sequence[str]) -> None:
        for (name, parameter), wide in zip(self._replica.named, self._wide, strict=True):
            if name in edited and wide.dtype != parameter.dtype:
                # What was put back, or left as it was, keeps the bits that 16 bits do not have.
                is_edited = wide.to(parameter.dtype) != parameter
                wide.copy_(torch.where(is_edited, parameter.float(), wide))
        self._shard.take_over(edited, self._session.runner.residuals())

    @ordinary_tensors()
    def _exchange(self, asks: bool) -> None:
        """asks: whether the model may differ from that of other ranks."""
        for (name, parameter), part in zip(self._replica.named, self._bucket.parts, strict=True):
            copy_gradient(name, parameter, part)
        unused = Unused(i for i, p in enumerate(self._replica.parameters) if p.grad is None)
        with self._session.entire(f"step {self._steps}"):
            self._average(unused, asks)

    def _average(self, unused: Unused, asks: bool) -> None:
        bucket = self._bucket
        with self._stage.on_host(bucket.values) as values:
            fault = None if self._marks_non_finite else bucket.find_non_finite(values)
            if fault is not None:
                values.fill_(torch.nan)  # in every shard, so that no owner steps
            self._shard.begin(values, unused)
            job = BucketJob(
                self._steps,
                bucket.tensors,
                values,
                unused=unused,
                alike=self._options_text(),
                values_alike=self._values_text,
                asks=asks,
            )
            is_applied = not self._session.average(job, fault).result().counters.skipped
            self._shard.follow(is_applied)
        self._stage.follow()
        if is_applied:
            self._add_changes()
        self._steps += 1
        self._replica.shared.note_values()

    def _add_changes(self) -> None:
        """Adds those in the bucket to the model."""
        places = zip(self._replica.parameters, self._wide, self._bucket.parts, strict=True)
        for parameter, wide, part in places:
            wide.add_(part)
            if wide.dtype != parameter.dtype:
                parameter.copy_(wide)

    def _options_text(self) -> str:
        """The options of the groups, which all ranks must have alike."""
        optimizer = self._shard.optimizer
        return self._options.of({type(optimizer).__name__: optimizer})

    def _values_text(self) -> str:
        """A line for each parameter."""
        checksums = checksums_of(self._replica.parameters)
        pairs = zip(self._replica.names, checksums, strict=True)
        return "\n".join(f"values of {name}, checksum {found:08x}" for name, found in pairs)

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The optimizer's, of the pieces that this rank owns."""
        return self._shard.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._shard.state = state

    def close(self) -> None:
        """Ends the communication thread and its process group, and gives the wrapped optimizer
        back. Statistics and residuals stay. Happens by itself at exit, or when this is dropped."""
        super().close()
        self._own_use.end()

    def stats(self) -> Stats:
        """Sums over all steps of this rank, and the tensors that go raw, with the reasons."""
        stats = self._session.stats()
        remarks = self._stage.remarks() + self._optimizer_watch.remarks
        return replace(stats, remarks=stats.remarks + remarks)

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer states with a value for each element."""
        return self._shard.state_bytes()

    def _wide_of_16_bits(self) -> list[torch.Tensor]:
        places = zip(self._wide, self._replica.parameters, strict=True)
        return [wide for wide, parameter in places if wide.dtype != parameter.dtype]

    @runs_hooks_of_saving
    def state_dict(self) -> checkpoint.StateDict:
        """This rank's shard, its residuals and the groups' options; every rank saves its own.

        Save the model's parameters, too; they are equal on all ranks.
        """
        refuse_get_state_dict(self)
        return {
            **self._session.state_dict(self._replica.identity(self._session), self._steps),
            "optimizer_class": type(self._optimizer).__name__,
            "shard": self._shard.state_dict(),
            "options": [copy_options(group) for group in options_of(self.param_groups)],
            "wide": [values.clone() for values in self._wide_of_16_bits()],
        }

    @runs_hooks_of_loading
    def load_state_dict(self, state_dict: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, and the model's parameters.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError for a state of
        another rank, world size, codec, class of optimizer or model.
        """
        state = checkpoint.with_clean_names(state_dict)
        self._replica.identity(self._session).check(state)
        checkpoint.check_optimizer(state, self._optimizer)
        if len(state["options"]) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(state['options'])} groups, this one {len(self.param_groups)}"
            )
        wide, saved_wide = self._wide_of_16_bits(), state.get("wide", ())
        if len(wide) != len(saved_wide):
            raise ValueError(
                f"the state has {len(saved_wide)} parameters of 16 bits, this model {len(wide)}: "
                "load it with a model of the dtype that it was saved with"
            )
        self._shard.load_state_dict(state["shard"])
        self._session.load_state_dict(state)
        self._steps = int(state["iterations"])
        for group, options in zip(self.param_groups, state["options"], strict=True):
            group.update(copy_options(options))
        overwrite(wide, saved_wide)
        self._replica.shared.allow_load()
