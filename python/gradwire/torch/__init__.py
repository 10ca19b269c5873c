"""Compressed exchange for PyTorch.

    optimizer = gradwire.torch.compress(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    ...
    print(optimizer.stats())

`compress` takes the way that fits: `gradwire_hook` for DistributedDataParallel, `FullyShardComm`
for FSDP2, `LocalSteps` for a plain model. `errors` has the errors and warnings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
    import torch.distributed as _distributed
except ModuleNotFoundError as error:
    from gradwire.errors import missing as _missing

    raise ModuleNotFoundError(
        "gradwire.torch needs PyTorch: " + _missing("torch", "'.[torch]'"), name="torch"
    ) from error

if not _distributed.is_initialized():
    # DDP imports this after init_process_group, and then its functions keep the default group as a
    # default argument: the group's threads outlive destroy_process_group, and one of them that
    # still holds a tensor when the interpreter ends aborts the process.
    import torch.distributed.nn.functional  # noqa: F401

from gradwire.local_schedule import Schedule
from gradwire.torch import errors
from gradwire.torch.checkpoints.per_rank import PerRank
from gradwire.torch.checkpoints.reshard import reshard
from gradwire.torch.compress import Compressed, compress
from gradwire.torch.hook.gradwire_state import GradwireState, Overlap, gradwire_hook
from gradwire.torch.link import loopback
from gradwire.torch.link.host_store import host_store
from gradwire.torch.optimizers.local_stats import LocalStats
from gradwire.torch.optimizers.local_steps import LocalSteps
from gradwire.torch.optimizers.presets import outer_nesterov, sparse_loco
from gradwire.torch.optimizers.sharded_optimizer import ShardedOptimizer
from gradwire.torch.records.options import Compression, Execution, Members
from gradwire.torch.records.save import save
from gradwire.torch.records.stats import Stats
from gradwire.torch.server.server_optimizer import ServerOptimizer
from gradwire.torch.server.server_stats import ServerStats

if TYPE_CHECKING:
    from gradwire.torch.backend.process_group import register_backend
    from gradwire.torch.fsdp.fully_shard_comm import FullyShardComm

__all__ = [
    "Compressed",
    "Compression",
    "Execution",
    "FullyShardComm",
    "GradwireState",
    "LocalStats",
    "LocalSteps",
    "Members",
    "Overlap",
    "PerRank",
    "Schedule",
    "ServerOptimizer",
    "ServerStats",
    "ShardedOptimizer",
    "Stats",
    "compress",
    "errors",
    "gradwire_hook",
    "host_store",
    "loopback",
    "outer_nesterov",
    "register_backend",
    "reshard",
    "save",
    "sparse_loco",
]


def __getattr__(name: str) -> Any:
    # They need parts of PyTorch that take time to import, and that earlier versions lack.
    if name == "FullyShardComm":
        from gradwire.torch.fsdp.fully_shard_comm import FullyShardComm

        return FullyShardComm
    if name == "register_backend":
        from gradwire.torch.backend.process_group import register_backend

        return register_backend
    raise AttributeError(f"module 'gradwire.torch' has no attribute {name!r}")
