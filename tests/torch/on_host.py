"""Buckets on the CPU as if they were on a GPU: their kernels run on the host (tests/cuda/on_host).

The module is the target _cuda_on_host of a build with GRADWIRE_CUDA_ON_HOST and GRADWIRE_PYTHON, as
the preset gcc is; or in the folder that the variable GRADWIRE_ON_HOST_MODULE names.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from gradwire.torch.device.kernels import KERNEL_MODULES

_BUILT = Path(__file__).parents[2] / "build" / "gcc" / "cuda_on_host"


@contextlib.contextmanager
def device_kernels() -> Iterator[None]:
    """Buckets on the CPU are encoded and decoded by the kernels."""
    folder = Path(os.environ.get("GRADWIRE_ON_HOST_MODULE", _BUILT))
    if not list(folder.glob("_cuda.*")):
        raise FileNotFoundError(f"{folder}: build the target _cuda_on_host (scripts/test.sh does)")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    with mock.patch.dict(KERNEL_MODULES, cpu="_cuda"):
        yield
