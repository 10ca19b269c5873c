"""Processes with a job key, or without one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.job_key import VARIABLE
from gradwire.torch import Execution, GradwireState, gradwire_hook
from joining_jobs import Course, take_part
from member_jobs import Plan, train
from training import batch, digest, make_model, make_optimizer

KEY, OTHER_KEY = "0123456789abcdef" * 4, "fedcba9876543210" * 4


@dataclass(frozen=True)
class Keyed:
    """A process that does `plan` with this key in its environment. None: without one."""

    key: str | None
    plan: Plan | Course


def run(port: int, number: int, keyed: Keyed) -> Any:
    if keyed.key is not None:
        os.environ[VARIABLE] = keyed.key
    if isinstance(keyed.plan, Course):
        return take_part(port, number, keyed.plan)
    return train(port, number, keyed.plan)


def train_with_hook(keys: list[str]) -> str:
    """Each rank has a key of these. Returns the digest of the model, or the error."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = make_optimizer(model)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(
        GradwireState(codec="raw", start_iter=0, execution=Execution(timeout=5.0)), gradwire_hook
    )
    with mock.patch.dict(os.environ, {VARIABLE: keys[rank]}):
        try:
            for step in range(3):
                inputs, labels = batch(rank, step)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(ddp(inputs), labels).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error)
    return digest(model)
