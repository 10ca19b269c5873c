"""Runs a training script, unchanged, over the backend "gradwire".

torchrun --nproc-per-node 4 -m gradwire.torch.run [options] train.py [its arguments]
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from gradwire import GradwireError
from gradwire.torch.backend.process_group import CODEC, NAME, register_backend

_BACKEND = f"cpu:{NAME},cuda:{NAME}"
_REPLACED = (None, "", "undefined", "gloo", "nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.torch.run",
        description="Runs a training script over the backend gradwire, which compresses large "
        "all-reduces and reduce-scatters: torchrun ... -m gradwire.torch.run train.py",
    )
    parser.add_argument("--codec", default=CODEC, help=f"of sums and averages (default: {CODEC})")
    parser.add_argument("--all-gather", metavar="CODEC", help="compress all-gathers, too")
    parser.add_argument(
        "--min-numel", type=int, default=65536, help="compress so many values or more (65536)"
    )
    parser.add_argument("script", help="the program, as python would run it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    options = parser.parse_args()
    if not Path(options.script).is_file():
        parser.error(f"there is no script {options.script}")
    try:
        register_backend(
            options.codec, options.codec, options.all_gather, min_numel=options.min_numel
        )
    except (GradwireError, ValueError) as error:
        parser.error(str(error))
    replaced = _with_backend(distributed_c10d.init_process_group)
    for module in (dist, distributed_c10d, device_mesh):
        if hasattr(module, "init_process_group"):
            module.init_process_group = replaced  # type: ignore[attr-defined]
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


def _with_backend(init: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> None:
        """torch.distributed.init_process_group, with the backend gradwire instead of Gloo or
        NCCL. Raises ValueError for other backends."""
        if backend not in _REPLACED:
            raise ValueError(
                f"init_process_group(backend={backend!r}): gradwire.torch.run takes the place of "
                "gloo and nccl"
            )
        init(_BACKEND, *args, **options)

    return init_process_group


if __name__ == "__main__":
    main()
