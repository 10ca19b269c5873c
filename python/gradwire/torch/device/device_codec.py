"""The kernels for a kind of device, and codecs on it whose memory is PyTorch's.

Work is queued on the device's current stream, and nothing here waits for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# The module that has the kernels for a kind of device. The CPU needs none.
KERNEL_MODULES = {"cuda": "gradwire._cuda"}


def require_kernels(device: torch.device) -> Any:
    """The module whose kernels run on this device: `gradwire._cuda`, or another one like it.

    Raises RuntimeError if gradwire was built without it, TypeError for other kinds of device.
    """
    module = KERNEL_MODULES.get(device.type)
    if module is None:
        raise TypeError(f"gradwire exchanges gradients on the CPU and on CUDA, not on {device}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"gradients on {device}: this gradwire was built without CUDA. Build it where nvcc is: "
            "pip install . -C cmake.define.GRADWIRE_CUDA=ON"
        ) from error


def has_kernels(device: torch.device) -> bool:
    """Whether gradients on this device are encoded and decoded there, and not on the CPU."""
    return device.type in KERNEL_MODULES


@dataclass(frozen=True)
class Span:
    """A segment's values in the bucket, and its draw stream."""

    offset: int
    numel: int
    stream: int


class Scratch:
    """Memory for the kernels of one stream, which use it one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(1, dtype=torch.int64, device=device)

    def reserve(self, size: int) -> None:
        if self._memory.numel() * 8 < size:
            self._memory = self._memory.new_empty((size + 7) // 8)

    @property
    def address(self) -> int:
        return self._memory.data_ptr()


class SegmentCodec:
    """One codec for some segments of a bucket, in this order: one launch handles all of them.

    payloads   uint8: the payloads that `encode` made; the i-th lies in the i-th of `rooms`
               (begin, size)
    encoded    int64 [segments, 2]: size of each payload (0 for a non-finite segment) and the
               segment's first non-finite value, or -1
    """

    def __init__(
        self,
        codec: str,
        spans: Sequence[Span],
        device: torch.device,
        scratch: Scratch,
        encodes: bool,
    ) -> None:
        triples = [(span.offset, span.numel, span.stream) for span in spans]
        self._kernels = require_kernels(device).BucketCodec(codec, triples)
        self._device = device
        self._scratch = scratch
        scratch.reserve(self._kernels.encode_scratch_size)
        table = np.frombuffer(self._kernels.table, np.uint8).copy()
        self._table = torch.from_numpy(table).to(device)
        self.rooms = self._kernels.payload_rooms
        begins = [begin for begin, _ in self.rooms]
        self._begins = torch.tensor(begins, dtype=torch.int64).to(device)
        name = self._kernels.residual_dtype
        self.residual_dtype: torch.dtype | None = None if name is None else getattr(torch, name)
        if encodes:
            self.payloads = self._table.new_empty(self._kernels.payloads_size)
            self.encoded = self._table.new_empty((len(spans), 2), dtype=torch.int64)

    def encode(
        self, bucket: torch.Tensor, residual: torch.Tensor | None, seed: int, step: int
    ) -> None:
        """Encodes the segments of `bucket` (float32), each with its part of `residual`."""
        self._kernels.encode(
            table=self._table.data_ptr(),
            x=_address(bucket, torch.float32),
            residual=0 if residual is None else _address(residual, self.residual_dtype),
            seed=seed,
            step=step,
            payloads=self.payloads.data_ptr(),
            encoded=self.encoded.data_ptr(),
            scratch=self._scratch.address,
            device=self._device.index or 0,
            stream=stream_of(self._device),
        )

    def places(self) -> torch.Tensor:
        """int64 [1, segments, 2]: begin in `payloads` and size of each payload of `encode`."""
        return torch.stack([self._begins, self.encoded[:, 0]], 1)[None]

    def decode(
        self,
        payloads: torch.Tensor,
        places: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool,
        divisor: float = 1.0,
    ) -> torch.Tensor:
        """Decodes into the segments of `out` (float32), or adds to them; divides the sum.

        places   int64 [sources, segments, 2]: begin of each payload in `payloads` (uint8), and its
                 size. The payloads of a segment are added in the order of the sources
        Returns int32 [sources * segments]: 0 where the payload is corrupt, and the segment's values
        are unspecified.
        """
        sources = len(places)
        assert places.shape == (sources, len(self.rooms), 2), places.shape
        self._scratch.reserve(self._kernels.decode_scratch_size(sources))
        decoded = places.new_empty((sources * len(self.rooms), 2), dtype=torch.int32)
        self._kernels.decode(
            table=self._table.data_ptr(),
            payloads=payloads.data_ptr(),
            places=_address(places, torch.int64),
            sources=sources,
            out=_address(out, torch.float32),
            accumulate=accumulate,
            divisor=divisor,
            decoded=decoded.data_ptr(),
            scratch=self._scratch.address,
            device=self._device.index or 0,
            stream=stream_of(self._device),
        )
        return decoded[:, 0]


def stream_of(device: torch.device) -> int:
    """The handle of the current stream."""
    if device.type != "cuda":
        return 0
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


def _address(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()
    return tensor.data_ptr()
