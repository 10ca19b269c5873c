"""The backend "gradwire" in place of Gloo and NCCL, in a program and in the processes it starts.

A process that is forked has what its parent has. One that multiprocessing starts afresh (mp.spawn,
a forkserver) reads a dictionary from its parent before it imports the program again, and
`_Replacement` in that dictionary does there what `replace_backend` did here. No other process can
be reached, so the program says at its end if nothing was compressed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from multiprocessing import spawn, util
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from gradwire.torch.backend.process_group import NAME, GradwireGroup, register_backend

_BACKEND = f"cpu:{NAME},cuda:{NAME}"
_REPLACED = (None, "", "undefined", "gloo", "nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")
_SAID = "gradwire.torch.run: nothing was compressed: "


@dataclass(frozen=True)
class _Replacement:
    """The arguments of replace_backend. Unpickling it calls that."""

    codec: str
    all_gather: str | None
    min_numel: int

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return replace_backend, astuple(self)


def replace_backend(codec: str, all_gather: str | None, min_numel: int) -> None:
    """From now on init_process_group takes the backend "gradwire" instead of Gloo and NCCL.

    Raises GradwireError or ValueError for what register_backend refuses.
    """
    register_backend(codec, codec, all_gather, min_numel=min_numel)
    replaced = _with_backend(distributed_c10d.init_process_group, min_numel)
    for module in (dist, distributed_c10d, device_mesh):
        if hasattr(module, "init_process_group"):
            module.init_process_group = replaced  # type: ignore[attr-defined]
    prepare = spawn.get_preparation_data

    def prepare_too(name: str) -> dict[str, Any]:
        _Program.has_started_others = True
        return prepare(name) | {"gradwire": _Replacement(codec, all_gather, min_numel)}

    spawn.get_preparation_data = prepare_too


class _Program:
    """What this process has done since its backend was replaced."""

    has_world = False
    has_started_others = False  # which have the backend, too


def watch_program() -> None:
    """In the process that a user starts: says at its end if it made no process group, nor started
    processes that could."""

    def note_fork() -> None:
        _Program.has_started_others = True

    def say(process: int = os.getpid()) -> None:
        if os.getpid() != process or _Program.has_world or _Program.has_started_others:
            return
        if not hasattr(sys, "last_value"):  # an error has said why
            print(
                f"{_SAID}no process group was made in this process. If it has started the ranks as "
                "programs of their own, start these with it: torchrun ... -m gradwire.torch.run "
                "train.py",
                file=sys.stderr,
            )

    os.register_at_fork(after_in_parent=note_fork)
    atexit.register(say)


def _with_backend(init: Callable[..., None], min_numel: int) -> Callable[..., None]:
    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> None:
        """torch.distributed.init_process_group, with the backend gradwire instead of Gloo or
        NCCL. Raises ValueError for other backends."""
        if backend not in _REPLACED:
            raise ValueError(
                f"init_process_group(backend={backend!r}): gradwire.torch.run takes the place of "
                "gloo and nccl"
            )
        init(_BACKEND, *args, **options)
        if not _Program.has_world and dist.get_rank() == 0 and dist.get_world_size() > 1:
            # Other than atexit's, multiprocessing's own finalizers run in forked processes, too.
            util.Finalize(None, _say_if_nothing, (min_numel,), exitpriority=0)
        _Program.has_world = True

    return init_process_group


def _say_if_nothing(min_numel: int) -> None:
    if not GradwireGroup.has_compressed and not hasattr(sys, "last_value"):
        print(
            f"{_SAID}no sum or average had {min_numel:,} values or more (--min-numel)",
            file=sys.stderr,
        )
