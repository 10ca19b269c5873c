"""Treats buckets on the CPU as if they were on a GPU: the kernels run on the host.

tests/cuda/on_host explains how. The module is the target _cuda_on_host of a build with
GRADWIRE_CUDA_ON_HOST and GRADWIRE_PYTHON, such as the preset gcc. The variable
GRADWIRE_ON_HOST_MODULE can name another folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from gradwire.torch.staging.stage import KERNEL_MODULES

_BUILT = Path(__file__).parents[2] / "build" / "gcc" / "cuda_on_host"


@contextlib.contextmanager
def device_kernels() -> Iterator[None]:
    """The kernels encode and decode buckets on the CPU."""
    folder = Path(os.environ.get("GRADWIRE_ON_HOST_MODULE", _BUILT))
    if not list(folder.glob("_cuda.*")):
        raise FileNotFoundError(f"{folder}: build the target _cuda_on_host (scripts/test.sh does)")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    with mock.patch.dict(KERNEL_MODULES, cpu="_cuda"):
        yield
