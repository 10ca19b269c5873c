"""Flower's federated averaging: workers step alone; a server, beside worker 0, averages them."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from flwr.client import NumPyClient, start_client
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire_lab.train import network
from gradwire_lab.train.settings import TrainSettings
from gradwire_lab.train.strategies import local_optimizer
from gradwire_lab.train.strategy import Strategy
from rivals.place import is_behind_link

_PORT = 29600
_SERVER = """
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg
n = {workers}
every = dict(min_fit_clients=n, min_available_clients=n, fraction_evaluate=0.0)
start_server(server_address="{address}", config=ServerConfig(10**6), strategy=FedAvg(**every))
"""


def choose(
    model: nn.Module, codec: str, settings: TrainSettings, workers: dist.ProcessGroup
) -> Strategy:
    server = f"{network.address(0) if is_behind_link() else '127.0.0.1'}:{_PORT}"
    process = None
    if workers.rank() == 0:
        program = _SERVER.format(workers=settings.workers, address=server)
        process = subprocess.Popen([sys.executable, "-c", program])
        time.sleep(10.0)  # until it listens
    dist.barrier(group=workers)
    return _Client(model, local_optimizer(model, settings), settings, server, process)


class _Client(Strategy, NumPyClient):
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: TrainSettings,
        server: str,
        process: subprocess.Popen[bytes] | None,
    ) -> None:
        Strategy.__init__(self, model, optimizer, clip=settings.clip)
        self._interval, self._process = settings.every, process
        self._averages: queue.Queue[Any] = queue.Queue()
        self._trained: queue.Queue[Any] = queue.Queue()
        options = {"server_address": server, "client": self.to_client()}
        threading.Thread(target=start_client, kwargs=options, daemon=True).start()
        self._averages.get()  # of no round yet: the first worker's weights, which are everybody's

    def get_parameters(self, config: Any) -> list[Any]:
        return [parameter.detach().numpy().copy() for parameter in self._model.parameters()]

    def fit(self, parameters: list[Any], config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        """A round, in Flower's thread."""
        self._averages.put(parameters)
        return self._trained.get(), 1, {}

    def take_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().take_step(inputs, targets)
        if self._steps % self._interval == 0:
            self._trained.put(self.get_parameters({}))
            with torch.no_grad():
                for parameter, value in zip(
                    self._model.parameters(), self._averages.get(), strict=True
                ):
                    parameter.copy_(torch.from_numpy(value))
        return loss

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
