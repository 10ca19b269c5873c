"""Compressed exchange for PyTorch.

    optimizer = gradwire.torch.compress(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    ...
    print(optimizer.stats())

`compress` takes the way that fits: `gradwire_hook` for DistributedDataParallel, `FullyShardComm`
for FSDP2, `LocalSteps` for a plain model. `errors` has the errors and warnings.
"""

from __future__ import annotations

from importlib import import_module
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

if TYPE_CHECKING:
    from gradwire.local_schedule import Schedule as Schedule
    from gradwire.torch import errors as errors
    from gradwire.torch.backend.process_group import register_backend as register_backend
    from gradwire.torch.checkpoints.per_rank import PerRank as PerRank
    from gradwire.torch.checkpoints.reshard import reshard as reshard
    from gradwire.torch.door import Compressed as Compressed
    from gradwire.torch.door import compress as compress
    from gradwire.torch.fsdp.fully_shard_comm import FullyShardComm as FullyShardComm
    from gradwire.torch.hook.gradwire_state import GradwireState as GradwireState
    from gradwire.torch.hook.gradwire_state import Overlap as Overlap
    from gradwire.torch.hook.gradwire_state import gradwire_hook as gradwire_hook
    from gradwire.torch.link import loopback as loopback
    from gradwire.torch.link.host_store import host_store as host_store
    from gradwire.torch.optimizers.local_stats import LocalStats as LocalStats
    from gradwire.torch.optimizers.local_steps import LocalSteps as LocalSteps
    from gradwire.torch.optimizers.presets import outer_nesterov as outer_nesterov
    from gradwire.torch.optimizers.presets import sparse_loco as sparse_loco
    from gradwire.torch.optimizers.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from gradwire.torch.records.options import Compression as Compression
    from gradwire.torch.records.options import Execution as Execution
    from gradwire.torch.records.options import Members as Members
    from gradwire.torch.records.save import save as save
    from gradwire.torch.records.stats import Stats as Stats
    from gradwire.torch.server.server_optimizer import ServerOptimizer as ServerOptimizer
    from gradwire.torch.server.server_stats import ServerStats as ServerStats

# Where each public name is. Whoever takes one loads what it needs: other parts of PyTorch take time
# to import, or are missing in earlier versions.
_HOMES = {
    "Compressed": "gradwire.torch.door",
    "Compression": "gradwire.torch.records.options",
    "Execution": "gradwire.torch.records.options",
    "FullyShardComm": "gradwire.torch.fsdp.fully_shard_comm",
    "GradwireState": "gradwire.torch.hook.gradwire_state",
    "LocalStats": "gradwire.torch.optimizers.local_stats",
    "LocalSteps": "gradwire.torch.optimizers.local_steps",
    "Members": "gradwire.torch.records.options",
    "Overlap": "gradwire.torch.hook.gradwire_state",
    "PerRank": "gradwire.torch.checkpoints.per_rank",
    "Schedule": "gradwire.local_schedule",
    "ServerOptimizer": "gradwire.torch.server.server_optimizer",
    "ServerStats": "gradwire.torch.server.server_stats",
    "ShardedOptimizer": "gradwire.torch.optimizers.sharded_optimizer",
    "Stats": "gradwire.torch.records.stats",
    "compress": "gradwire.torch.door",
    "errors": "gradwire.torch",
    "gradwire_hook": "gradwire.torch.hook.gradwire_state",
    "host_store": "gradwire.torch.link.host_store",
    "loopback": "gradwire.torch.link",
    "outer_nesterov": "gradwire.torch.optimizers.presets",
    "register_backend": "gradwire.torch.backend.process_group",
    "reshard": "gradwire.torch.checkpoints.reshard",
    "save": "gradwire.torch.records.save",
    "sparse_loco": "gradwire.torch.optimizers.presets",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwire.torch' has no attribute {name!r}")
    if name in ("errors", "loopback"):
        return import_module(f"{_HOMES[name]}.{name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
