"""Copies of many tensors between a device and the host, in few pieces.

For what is copied now and then: a model that is sent to other ranks, states, anchors.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from gradwire._core import checksum32
from gradwire.torch.network.transport import NOTHING, Bytes
from gradwire.torch.parameters import NamedTensor, ordinary_tensors, split_like, writing_to
from gradwire.torch.staging.copier import Copier, new_page_locked

_MOST_GATHERED = 1 << 25  # bytes of small tensors that one copy takes: twice that is more memory


def moved(
    tensors: Iterable[torch.Tensor], devices: Iterable[torch.device] | None = None
) -> Iterator[torch.Tensor]:
    """The values of each tensor on a device of its own, row-major, one after the other.

    Tensors that follow each other are gathered and copied together, so the number of copies depends
    on the bytes, and hardly on the number of tensors. Each copy is waited for.

    Args:
        devices: For each tensor. None: the host.

    Returns:
        Tensors of the same dtypes and shapes; where a tensor is on that device already, itself.
    """
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    targets = len(plain) * [torch.device("cpu")] if devices is None else list(devices)
    gathered: list[torch.Tensor] = []
    way, size = None, 0
    for tensor, target in zip(plain, targets, strict=True):
        size += tensor.nbytes
        if way != (tensor.device, target) or size > _MOST_GATHERED:
            yield from _copies(gathered, way)
            gathered, way, size = [], (tensor.device, target), tensor.nbytes
        gathered.append(tensor)
    yield from _copies(gathered, way)


@ordinary_tensors()
def _copies(
    tensors: Sequence[torch.Tensor], way: tuple[torch.device, torch.device] | None
) -> Sequence[torch.Tensor]:
    """way: from which device to which."""
    if way is None or way[0] == way[1]:
        return [tensor.contiguous() for tensor in tensors]
    if len(tensors) == 1:
        return [tensors[0].contiguous().to(way[1])]
    together = torch.cat([_bytes_of(tensor) for tensor in tensors]).to(way[1])
    pieces = together.split([tensor.nbytes for tensor in tensors])
    return [_as(tensor, piece) for tensor, piece in zip(tensors, pieces, strict=True)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # (PyTorch has strides of 0 for some tensors without values, which it can't look at as bytes.)
    flat = tensor.contiguous().view(-1) if tensor.numel() else tensor.new_empty(0)
    return flat.view(torch.uint8)


def _as(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The bytes as a tensor like this one. (A clone starts at an address that suits every type.)"""
    flat = values.clone() if like.numel() else values.new_empty(0)
    return flat.view(like.dtype).view(like.shape)


def pack(tensors: Iterable[torch.Tensor], head: Bytes = NOTHING) -> Bytes:
    """`head`, and then the bytes of the tensors' values, one after the other."""
    tensors = list(tensors)
    message = np.empty(head.size + sum(tensor.nbytes for tensor in tensors), dtype=np.uint8)
    message[: head.size] = head
    at = head.size
    for values in moved(tensors):
        message[at : at + values.nbytes] = _bytes_of(values).numpy()
        at += values.nbytes
    return message


@ordinary_tensors()
def unpack(message: Bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Writes what `pack` made of tensors like these into them."""
    pieces = torch.from_numpy(message).split([tensor.nbytes for tensor in tensors])
    there = moved(pieces, [tensor.device for tensor in tensors])
    for tensor, values in zip(tensors, there, strict=True):
        with writing_to(tensor):
            tensor.copy_(_as(tensor, values))


@ordinary_tensors()
def overwrite(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes these values, of any dtype, device and order in memory, into the tensors."""
    there = moved(values, [tensor.device for tensor in tensors])
    for tensor, new in zip(tensors, there, strict=True):
        with writing_to(tensor):
            tensor.copy_(new)


def checksums_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of the bytes of each tensor."""
    return [checksum32(_bytes_of(values).numpy()) for values in moved(tensors)]


def describe_values(named: Sequence[NamedTensor]) -> list[str]:
    """A line for each tensor, which differs where its bytes do."""
    values = moved(tensor for _, tensor in named)
    digests = (hashlib.sha256(_bytes_of(each).numpy()).hexdigest()[:16] for each in values)
    return [f"{name} {digest}" for (name, _), digest in zip(named, digests, strict=True)]


class Shelf:
    """Float32 parameters of a device that lie on the host, and come to the device to be used.

    Attributes:
        copied_bytes: In both directions.
    """

    @ordinary_tensors()
    def __init__(self, tensors: Sequence[nn.Parameter], page_locked: bool) -> None:
        """Moves them to the host. page_locked: in page-locked memory.

        Raises RuntimeError where PyTorch has no such memory.
        """
        self._tensors, self._copier = tensors, Copier(has_streams=False)
        self._device = tensors[0].device
        numel = sum(tensor.numel() for tensor in tensors)
        if page_locked and numel > 0:
            self._host = new_page_locked(numel, torch.float32)
        else:
            self._host = torch.empty(numel, dtype=torch.float32, device="cpu")
        self._uses = 0  # under way
        self._is_changed = True
        self.copied_bytes = 0
        self._there: torch.Tensor | None = torch.cat([t.detach().reshape(-1) for t in tensors])
        self._put_back()

    @contextlib.contextmanager
    def at_hand(self, changes: bool = True) -> Iterator[None]:
        """Inside, they are on the device. changes: whether they may change there."""
        self._is_changed |= changes
        if not self._uses:
            self._bring()
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._put_back()

    @ordinary_tensors()
    def _bring(self) -> None:
        self._there = torch.empty(self._host.numel(), dtype=torch.float32, device=self._device)
        self._copier.to_device(self._host, self._there)
        self.copied_bytes += self._host.nbytes
        self._let_lie_in(self._there)

    @ordinary_tensors()
    def _put_back(self) -> None:
        assert self._there is not None, "they were brought"
        if self._is_changed:
            self._copier.to_host(self._there, self._host)
            self.copied_bytes += self._host.nbytes
        self._is_changed, self._there = False, None
        self._let_lie_in(self._host)

    def _let_lie_in(self, flat: torch.Tensor) -> None:
        for tensor, values in zip(self._tensors, split_like(flat, self._tensors), strict=True):
            try:
                tensor.data = values
            except RuntimeError:  # as of a device whose tensors are of a class of their own
                torch.utils.swap_tensors(tensor, nn.Parameter(values))
