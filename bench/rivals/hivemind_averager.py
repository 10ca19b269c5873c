"""hivemind's averager: workers step alone and average their parameters in 8 bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Uniform8BitQuantization
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire_lab.train import messages
from gradwire_lab.train.settings import TrainSettings
from gradwire_lab.train.strategies import local_optimizer
from gradwire_lab.train.strategy import Strategy
from rivals.place import address

_MATCHMAKING_SECONDS = 3.0  # "3-5s for small local runs": the docstring of hivemind.Optimizer


def choose(
    model: nn.Module, codec: str, settings: TrainSettings, workers: dist.ProcessGroup
) -> Strategy:
    hosts = [f"/ip4/{address()}/tcp/0"]
    peers: list[str] = []
    dht = None
    if workers.rank() == 0:
        dht = DHT(host_maddrs=hosts, start=True)
        peers = [str(each) for each in dht.get_visible_maddrs()]
    peers = messages.broadcast(peers)
    if dht is None:
        dht = DHT(initial_peers=peers, host_maddrs=hosts, start=True)
    averager = DecentralizedAverager(
        [parameter.detach().clone() for parameter in model.parameters()],
        dht,
        start=True,
        prefix="rivals",
        target_group_size=settings.workers,
        min_group_size=settings.workers,
        min_matchmaking_time=_MATCHMAKING_SECONDS,
        request_timeout=_MATCHMAKING_SECONDS / 2,
        compression=Uniform8BitQuantization(),
    )
    return _Peer(model, local_optimizer(model, settings), averager, dht, settings)


class _Peer(Strategy):
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        averager: DecentralizedAverager,
        dht: DHT,
        settings: TrainSettings,
    ) -> None:
        super().__init__(model, optimizer, clip=settings.clip)
        self._averager, self._dht, self._interval = averager, dht, settings.every

    @torch.no_grad()
    def take_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = super().take_step(inputs, targets)
        if self._steps % self._interval == 0:
            own = list(self._model.parameters())
            with self._averager.get_tensors() as tensors:
                for tensor, parameter in zip(tensors, own, strict=True):
                    tensor.copy_(parameter)
            if self._averager.step(timeout=60.0) is None:
                raise RuntimeError("hivemind: no group was found")
            with self._averager.get_tensors() as tensors:
                for tensor, parameter in zip(tensors, own, strict=True):
                    parameter.copy_(tensor)
        return loss

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()
