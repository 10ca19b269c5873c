"""torchft's DiLoCo, each worker a replica of one process."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from gradwire_lab.train import messages
from gradwire_lab.train.settings import TrainSettings
from gradwire_lab.train.strategies import local_optimizer
from gradwire_lab.train.strategy import Strategy
from rivals.place import address
from rivals.ways import BUCKETS


def choose(
    model: nn.Module, codec: str, settings: TrainSettings, workers: dist.ProcessGroup
) -> Strategy:
    own = address()
    lighthouse = None
    told = ""
    if workers.rank() == 0:
        lighthouse = LighthouseServer(bind=f"{own}:0", min_replicas=settings.workers)
        told = f"http://{own}:{lighthouse.address().rpartition(':')[2]}"
    told = messages.broadcast(told)
    # A replica's own store.
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    inner = local_optimizer(model, settings)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda saved: model.load_state_dict(saved["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=settings.workers,
        use_async_quorum=False,  # as DiLoCo asks
        init_sync=False,  # all begin with the same weights
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=told,
        replica_id=f"replica_{workers.rank()}",
        hostname=own,
    )
    return _Replica(model, inner, settings, manager, codec == BUCKETS, (lighthouse, store))


class _Replica(Strategy):
    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        settings: TrainSettings,
        manager: Manager,
        buckets: bool,
        kept: tuple[object, ...],
    ) -> None:
        """kept: what the manager needs while it lives."""
        super().__init__(model, inner, clip=settings.clip)
        self._manager, self._kept = manager, kept
        outer = SGD(model.parameters(), settings.outer_lr, momentum=0.9, nesterov=True)
        self._diloco = DiLoCo(
            manager, [model], inner, outer, settings.every, use_bucketization=buckets
        )
        self._diloco.__enter__()

    def close(self) -> None:
        self._manager.shutdown(wait=False)
