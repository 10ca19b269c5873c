"""Processes with a job key, or without one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from gradwire.job_key import VARIABLE
from joining_jobs import Course, take_part
from member_jobs import Plan, train
from training import digest, loss_of, make_model
from ways import build

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
    with mock.patch.dict(os.environ, {VARIABLE: keys[dist.get_rank()]}):
        training = build("hook", make_model(), codec="raw", start_iter=0, timeout=5.0)
        try:
            training.run(3, loss_of)
        except RuntimeError as error:
            return str(error)
    return digest(training.model)
