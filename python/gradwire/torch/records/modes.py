"""Keeps gradwire's tensors apart from what the program has set for its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Around code, or as a decorator: it computes without gradients, and what it makes are ordinary
    tensors, which can be changed anywhere, although the program may be in inference mode, under
    `with torch.device(...)` or in another mode of its own.

    The default dtype belongs to the whole process, whose other threads use it. So each factory
    names its dtype (and device) nevertheless.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def writing_to(*tensors: torch.Tensor) -> AbstractContextManager[object]:
    """Around code that changes the tensors, of which some may have been made in inference mode:
    these can be changed only there."""
    is_inference = any(tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if is_inference else contextlib.nullcontext()
