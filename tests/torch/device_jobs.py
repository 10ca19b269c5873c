"""The functions that the ranks of a test cluster run with buckets on a device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist

import jobs
from gradwire.torch.network import engine
from on_host import device_kernels
from training import Options, Trained, train


def train_on_device(all_options: list[Options]) -> list[Trained]:
    with device_kernels():
        return [train(options) for options in all_options]


def train_one_on_device(options: list[Options], on_device: list[int]) -> Trained:
    """Some ranks have their buckets on a device, the others on the CPU."""
    rank = dist.get_rank()
    if rank not in on_device:
        return train(options[rank])
    with device_kernels():
        return train(options[rank])


def train_and_signal_on_device(options: Options, victim: int, at_step: int, number: int) -> None:
    with device_kernels():
        jobs.train_and_signal(options, victim, at_step, number)


def train_and_fail_between_push_and_pull(options: Options, victim: int, at_step: int) -> None:
    """The victim raises after it has received a push, before it makes a pull."""

    def on_step(step: int) -> None:
        if dist.get_rank() == victim and step == at_step:
            broken = mock.Mock(side_effect=ArithmeticError("planted"))
            mock.patch.object(engine, "_receive", broken).start()

    try:
        with device_kernels():
            train(options, on_step)
    finally:
        mock.patch.stopall()


def train_scaled_on_device(*arguments: Any) -> jobs.Scaled:
    with device_kernels():
        return jobs.train_scaled(*arguments)
