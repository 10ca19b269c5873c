"""The device that a worker computes on: `cpu`, `cuda` or `cuda:K` in the settings."""

from __future__ import annotations

import torch

from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.settings import TrainSettings


def check_usable(settings: TrainSettings) -> None:
    """Raises TrainError unless this machine and its PyTorch have the settings' device, a GPU."""
    asked = f"--device {settings.device}"
    if not torch.cuda.is_available():
        raise TrainError(f"{asked}: PyTorch {torch.__version__} has no GPU here: {_why_no_gpu()}")
    device, count = torch.device(settings.device), torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise TrainError(f"{asked}: there are {count} GPUs here, cuda:0 to cuda:{count - 1}")


def of_worker(name: str, local_rank: int) -> torch.device:
    """`cuda` gives the workers of a machine its GPUs in turn; more workers than GPUs share them.

    local_rank: the worker's rank among the workers of its machine; if unknown, among all workers.
    """
    if name == "cuda":
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device(name)


def describe(device: torch.device) -> str:
    """`cpu`, or `cuda:0 (NVIDIA H100)`."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def wait_for(device: torch.device) -> None:
    """Waits until the device has done all its work; a clock must be read only then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    return "no device"
