"""What the ranks of a cluster run with their buckets on a device."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import jobs
from gradwire.torch import GradwireState, device_exchange, device_queue, gradwire_hook
from on_host import device_kernels
from training import Options, Trained, batch, digest, make_model, make_optimizer, train


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
    """The victim raises when it has added the pushes of a bucket, and makes no pull."""

    def on_step(step: int) -> None:
        if dist.get_rank() == victim and step == at_step:
            broken = mock.Mock(side_effect=ArithmeticError("planted"))
            mock.patch.object(device_exchange, "_require_valid", broken).start()

    try:
        with device_kernels():
            train(options, on_step)
    finally:
        mock.patch.stopall()


def train_scaled_on_device(*arguments: Any) -> jobs.Scaled:
    with device_kernels():
        return jobs.train_scaled(*arguments)


def train_captured(
    state: dict[str, Any], captured_from: int, steps: int, poisoned_step: int = -1
) -> tuple[str, int, list[bool]]:
    """Steps from `captured_from` on are taken as if a CUDA graph were captured in each.

    Returns the digest of the parameters, the void replays, and which steps gave NaN. A step that
    does is not applied. In the end, a state can be saved and not loaded if anything was captured.
    """
    rank = dist.get_rank()
    model = make_model()
    optimizer = make_optimizer(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    hook_state = GradwireState(**state)
    ddp.register_comm_hook(hook_state, gradwire_hook)
    void = []
    with device_kernels():
        for step in range(steps):
            captures = step >= captured_from
            inputs, labels = batch(rank, step)
            if step == poisoned_step and rank == 1:
                inputs[0, 0] = torch.nan
            optimizer.zero_grad()
            with mock.patch.object(device_queue, "is_capturing", return_value=captures):
                nn.functional.cross_entropy(ddp(inputs), labels).backward()
            nan = [bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None]
            void.append(all(nan))
            if not any(nan):
                optimizer.step()
        saved = hook_state.state_dict()
        with contextlib.ExitStack() as stack:
            if steps > captured_from:
                stack.enter_context(pytest.raises(RuntimeError, match="a CUDA graph holds"))
            hook_state.load_state_dict(saved)
        return digest(model), hook_state.void_replays(), void
