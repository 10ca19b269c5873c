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
    import torch as _torch
    import torch.distributed as _distributed
    from torch.torch_version import TorchVersion as _TorchVersion
except ModuleNotFoundError as error:
    from gradwire.errors import missing as _missing

    raise ModuleNotFoundError(
        "gradwire.torch needs PyTorch: " + _missing("torch", "'.[torch]'"), name="torch"
    ) from error

if _TorchVersion(_torch.__version__) < "2.9":
    raise ImportError(f"gradwire.torch needs PyTorch 2.9 or newer; this is {_torch.__version__}")

if not _distributed.is_initialized():
    # DDP imports this after init_process_group, and then its functions keep the default group as a
    # default argument: the group's threads outlive destroy_process_group, and one of them that
    # still holds a tensor when the interpreter ends aborts the process.
    import torch.distributed.nn.functional  # noqa: F401

if TYPE_CHECKING:
    from gradwire.local_schedule import Schedule
    from gradwire.torch import errors
    from gradwire.torch.advice import advise
    from gradwire.torch.backend.process_group import register_backend
    from gradwire.torch.checkpoint import save
    from gradwire.torch.door import Compressed, compress
    from gradwire.torch.fsdp.fully_shard_comm import FullyShardComm
    from gradwire.torch.group_folder import GroupFolder
    from gradwire.torch.hook.gradwire_state import GradwireState, gradwire_hook
    from gradwire.torch.hook.overlap import Overlap
    from gradwire.torch.network import loopback
    from gradwire.torch.network.sealed_store import host_store
    from gradwire.torch.optimizers.diloco import DiLoCo
    from gradwire.torch.optimizers.local_rules import outer_nesterov, pulse_loco, sparse_loco
    from gradwire.torch.optimizers.local_stats import LocalStats
    from gradwire.torch.optimizers.local_steps import LocalSteps
    from gradwire.torch.optimizers.sharded_optimizer import ShardedOptimizer
    from gradwire.torch.options import Compression, Execution, Members
    from gradwire.torch.resharding.reshard import PerRank, reshard
    from gradwire.torch.server.server_optimizer import ServerOptimizer
    from gradwire.torch.server.server_settings import BackupWorkers
    from gradwire.torch.server.server_stats import ServerStats
    from gradwire.torch.stats import Stats

__all__ = [
    "BackupWorkers",
    "Compressed",
    "Compression",
    "DiLoCo",
    "Execution",
    "FullyShardComm",
    "GradwireState",
    "GroupFolder",
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
    "advise",
    "compress",
    "errors",
    "gradwire_hook",
    "host_store",
    "loopback",
    "outer_nesterov",
    "pulse_loco",
    "register_backend",
    "reshard",
    "save",
    "sparse_loco",
]

# Where the names are. Whoever takes one loads what it needs: other parts of PyTorch take time to
# import.
_MODULES = {"errors": "gradwire.torch.errors", "loopback": "gradwire.torch.network.loopback"}
_HOMES = {
    "gradwire.local_schedule": ("Schedule",),
    "gradwire.torch.advice": ("advise",),
    "gradwire.torch.backend.process_group": ("register_backend",),
    "gradwire.torch.checkpoint": ("save",),
    "gradwire.torch.door": ("Compressed", "compress"),
    "gradwire.torch.fsdp.fully_shard_comm": ("FullyShardComm",),
    "gradwire.torch.group_folder": ("GroupFolder",),
    "gradwire.torch.hook.gradwire_state": ("GradwireState", "gradwire_hook"),
    "gradwire.torch.hook.overlap": ("Overlap",),
    "gradwire.torch.network.sealed_store": ("host_store",),
    "gradwire.torch.optimizers.diloco": ("DiLoCo",),
    "gradwire.torch.optimizers.local_rules": ("outer_nesterov", "pulse_loco", "sparse_loco"),
    "gradwire.torch.optimizers.local_stats": ("LocalStats",),
    "gradwire.torch.optimizers.local_steps": ("LocalSteps",),
    "gradwire.torch.optimizers.sharded_optimizer": ("ShardedOptimizer",),
    "gradwire.torch.options": ("Compression", "Execution", "Members"),
    "gradwire.torch.resharding.reshard": ("PerRank", "reshard"),
    "gradwire.torch.server.server_optimizer": ("ServerOptimizer",),
    "gradwire.torch.server.server_settings": ("BackupWorkers",),
    "gradwire.torch.server.server_stats": ("ServerStats",),
    "gradwire.torch.stats": ("Stats",),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(home), name)
            return found
    raise AttributeError(f"module 'gradwire.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
