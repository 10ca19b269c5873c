"""Compressed sums between the replicas of torchft, which come and go.

    from gradwire.contrib.torchft import DistributedDataParallel, ProcessGroupGradwire

    manager = torchft.Manager(pg=ProcessGroupGradwire("3lc:s=1.00,coder=rice"), **options)
    model = DistributedDataParallel(manager, model)

The manager finds out which replicas take part in a step, and gives them a new group whenever they
change. The group keeps a residual for each tensor in memory that is reduced again and again, such
as DDP's buckets.
"""

# No annotations from __future__: DDP looks at those of a hook.
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from gradwire.errors import requiring, warn_user

with requiring(__name__, "torchft", "torchft", "'.[recipes]'"):
    import torchft
    from torchft.process_group import ProcessGroupWrapper

from gradwire.option_record import explains_arguments
from gradwire.torch.backend.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Rules
from gradwire.torch.backend.process_group import NAME, GradwireGroup
from gradwire.torch.errors import ResidualDroppedWarning
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings
from gradwire.torch.options import Execution


class ProcessGroupGradwire(ProcessGroupWrapper):
    """A process group for torchft's Manager that compresses large sums and averages.

    codec      of all_reduce, both ways. A codec with error feedback, such as 3lc, keeps a residual
               for each tensor that comes again in the same memory
    min_numel  operations with fewer values are not compressed, nor those of other dtypes
    dtypes     some of float32, bfloat16 and float16; by default all
    timeout    for connecting, and for a replica that is connected but silent
    execution  threads, target and seed

    All else goes over Gloo on the CPU and NCCL on CUDA. When the replicas change, residuals are
    dropped on all of them, with a ResidualDroppedWarning; they hold the gradients of a few steps.
    Where the connection to a replica breaks, torchft leaves out the step, and the replicas that
    are left go on. Raises GradwireError for an unknown codec, ValueError for other arguments.
    """

    @explains_arguments
    def __init__(
        self,
        codec: str = "int8:bucket=256",
        *,
        min_numel: int = 65536,
        dtypes: Sequence[torch.dtype] = tuple(RAW_CODECS),
        timeout: timedelta = timedelta(seconds=60),
        execution: Execution = Execution(),
    ) -> None:
        super().__init__(timeout)
        self._rules = Rules(
            {ALL_REDUCE: codec, REDUCE_SCATTER: None, ALL_GATHER: None},
            min_numel,
            dtypes,
            ExchangeSettings(**vars(execution)),
            keeps_residuals=True,
        )
        self.sent_bytes = 0  # by compressed sums of earlier groups
        self.raw_bytes = 0  # what they would have sent uncompressed

    def getBackendName(self) -> str:  # noqa: N802 - torchft calls it
        return NAME

    def errored(self) -> Exception | None:
        """The error that ended the present group; the manager then asks for a new one."""
        group = self._pg
        return group.error if isinstance(group, GradwireGroup) else None

    def abort(self, errored: bool = True) -> None:
        group = self._pg
        super().abort(errored)
        if isinstance(group, GradwireGroup):
            self._account_for(group)
            self._warn_of_dropped(group)

    def shutdown(self) -> None:
        group = self._pg
        super().shutdown()
        if isinstance(group, GradwireGroup):
            self._account_for(group)

    def ratio(self) -> float | None:
        """Bytes without compression / bytes sent, of all compressed sums; None: there were none."""
        stats = self._pg.stats()[ALL_REDUCE] if isinstance(self._pg, GradwireGroup) else {}
        sent = self.sent_bytes + stats.get("sent_bytes", 0)
        return (self.raw_bytes + stats.get("raw_bytes", 0)) / sent if sent else None

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return GradwireGroup(store, rank, world_size, self._rules, self._timeout)

    def _account_for(self, group: GradwireGroup) -> None:
        stats = group.stats()[ALL_REDUCE]
        self.sent_bytes += stats["sent_bytes"]
        self.raw_bytes += stats["raw_bytes"]

    def _warn_of_dropped(self, group: GradwireGroup) -> None:
        if values := group.kept_values:
            warn_user(
                f"a group of {group.size()} replicas ends, so the residuals of this replica are "
                f"dropped, {values:,} values",
                ResidualDroppedWarning,
            )


class DistributedDataParallel(torchft.DistributedDataParallel):
    """torchft's, but after an error it gives DDP the bucket as it is, and does not raise.

    (torchft 0.2 raises an AttributeError for every bucket after one that failed. The manager knows
    of the error by then, and `should_commit` leaves out the step.)
    """

    @staticmethod
    def _comm_hook(
        state: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined] # PyTorch hides it from checkers
    ) -> Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: Future[torch.Tensor] = Future()
        done.set_result(bucket.buffer())
        return done
