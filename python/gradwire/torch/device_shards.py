"""The segments of a bucket on a device as one rank sees them: codecs, messages, residuals.

All work is queued on the device's current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire._core import Layout
from gradwire.torch.device_codec import Scratch, SegmentCodec, Span
from gradwire.torch.device_message import Origin, Part, ShardMessage, Words
from gradwire.torch.device_residuals import DeviceResiduals

_NO_SHARDS: tuple[int, ...] = ()


class DeviceShards:
    """What `rank` encodes and decodes of a layout's shards in a sharded exchange.

    encoded   by shard: what this rank sends, its push or, of its own shard, its pull
    pushed    what it gets of its own shard
    pulled    by shard: what it gets of the averages, its own too
    runs      by shard: where its values lie in the bucket, what is consecutive in one piece
    A lone rank has no messages.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device, seed: int) -> None:
        self.layout = layout
        self.rank = rank
        self.world_size = layout.workers
        self.peers = tuple(peer for peer in range(self.world_size) if peer != rank)
        self.device = device
        self.segments: list[dict[str, Any]] = layout.segments
        self._seed = seed
        self._streams = layout.streams(rank)
        self._scratch = Scratch(device)
        self.runs = [self._runs_of(shard) for shard in range(self.world_size)]
        lone = self.world_size == 1
        mine, ranks = (_NO_SHARDS, _NO_SHARDS) if lone else ((rank,), range(self.world_size))
        self.encoded = self._messages(self.peers, "push_codec", encodes=True)
        self.encoded |= self._messages(mine, "pull_codec", encodes=True)
        self.pulled = self._messages(ranks, "pull_codec", encodes=False)
        self.pushed = self._messages(mine, "push_codec", encodes=False).get(rank)
        self.residuals = DeviceResiduals(self.segments, layout.numel, rank, self.world_size, device)
        for part in parts_of(self.encoded):
            if part.codec.residual_dtype is not None:
                for i in part.segments:
                    self.residuals.keep(i, part.codec.residual_dtype)
        self._constants: dict[tuple[int, ...], torch.Tensor] = {}
        self._owners = {
            codec: torch.tensor(
                [
                    self.segments[i]["owner"]
                    for part in parts_of(self.encoded)
                    if part.codec is codec
                    for i in part.segments
                ]
            ).to(device)
            for codec in self.codecs_of(self.encoded)
        }
        everything = [*parts_of(self.encoded), *parts_of(self.pulled)]
        everything += [] if self.pushed is None else self.pushed.parts
        # The same verdict on every rank.
        self._any_residuals = any(part.codec.residual_dtype is not None for part in everything)

    @property
    def keeps_residuals(self) -> bool:
        """Whether any segment has a residual on any rank."""
        return self._any_residuals or bool(self.residuals)

    def codecs_of(self, shards: Iterable[int]) -> list[SegmentCodec]:
        """All that encode any of these shards, each once."""
        parts = parts_of({shard: self.encoded[shard] for shard in shards})
        return list(dict.fromkeys(part.codec for part in parts))

    def encode(self, bucket: torch.Tensor, shards: Iterable[int], step: int) -> None:
        """With this rank's residuals, into the codecs' payloads."""
        for codec in self.codecs_of(shards):
            dtype = codec.residual_dtype
            residual = None if dtype is None else self.residuals.tensor(dtype)
            codec.encode(bucket, residual, self._seed, step)

    def owners_of(self, codec: SegmentCodec) -> torch.Tensor:
        """int64, on the device: of each segment that the codec encodes, its owner."""
        return self._owners[codec]

    def on_device(self, values: Sequence[int]) -> torch.Tensor:
        """int64. Those of messages of fixed sizes are the same in each step, and stay there."""
        key = tuple(values)
        found = self._constants.get(key)
        if found is None:
            found = torch.tensor(key, dtype=torch.int64).to(self.device)
            messages = [*self.pulled.values()] + ([] if self.pushed is None else [self.pushed])
            if all(message.fixed_length is not None for message in messages):
                self._constants[key] = found
        return found

    def find_non_finite(self, bucket: torch.Tensor, shards: Iterable[int]) -> Origin | None:
        """The first NaN or Inf in these shards, where anybody keeps a residual."""
        shards = list(shards)
        runs = [run for shard in shards for run in self.runs[shard]]
        if not self.keeps_residuals or not runs:
            return None
        largest = torch.stack([torch.linalg.vector_norm(bucket[run], torch.inf) for run in runs])
        if bool(torch.isfinite(largest).all()):
            return None
        for i in (i for shard in shards for i in self._segments_of(shard)):
            bad = torch.isfinite(bucket[self.residuals.place(i)]).logical_not().nonzero()
            if len(bad):
                return Origin(self.rank, i, int(bad[0]))
        raise AssertionError("the shards are made of their segments")

    def place_of(self, origin: Origin) -> dict[str, Any]:
        """The origin, as users are told."""
        if not 0 <= origin.segment < len(self.segments):  # it came from another rank
            return {"rank": origin.rank, "tensor": "?", "element": origin.element}
        segment = self.segments[origin.segment]
        element = segment["tensor_offset"] + origin.element
        return {"rank": origin.rank, "tensor": segment["name"], "element": element}

    def put_back(self, shards: Iterable[int]) -> None:
        """What was encoded of the shards goes back into the residuals."""
        messages = {shard: self.encoded[shard] for shard in shards}
        sent = torch.zeros(self.layout.numel, dtype=torch.float32, device=self.device)
        for codec in self.codecs_of(messages):
            if codec.residual_dtype is None:
                continue
            parts = [part for part in parts_of(messages) if part.codec is codec]
            places = codec.places()
            left = torch.ones(places.shape[1], dtype=torch.bool)
            for part in parts:
                left[part.first : part.last] = False
            places[0, left.to(self.device), 1] = 0  # of other shards nothing is decoded
            codec.decode(codec.payloads, places, sent, accumulate=False)
            for i in (i for part in parts for i in part.segments):
                self.residuals.add(i, sent[self.residuals.place(i)])

    def error_norm(self, bucket: torch.Tensor) -> float | None:
        """Norm of what the pushes of this step left unsent, over the norm of their input."""
        error, total = torch.zeros(2, dtype=torch.float64, device=self.device).unbind()
        decoded = torch.zeros_like(bucket)
        for codec in self.codecs_of(self.peers):
            codec.decode(codec.payloads, codec.places(), decoded, accumulate=False)
        for i in (i for peer in self.peers for i in self.encoded[peer].segments):
            place, owed = self.residuals.place(i), self.residuals.of(i)
            wanted = bucket[place].double()
            left = wanted - decoded[place].double() if owed is None else owed.double()
            error += left.square().sum()
            total += wanted.square().sum()
        return float((error / total).sqrt()) if float(total) > 0 else None

    def import_residual(
        self, kind: str, name: str, offset: int, values: npt.NDArray[np.float32]
    ) -> None:
        if self.world_size == 1:  # it sends nothing, and pays what it takes over in its next step
            for i, segment in enumerate(self.segments):
                dtype = self._codec(segment["pull_codec"], (), encodes=False).residual_dtype
                if segment["name"] == name and dtype is not None:
                    self.residuals.keep(i, dtype)
        self.residuals.import_piece(kind, name, offset, values)

    def _messages(self, shards: Sequence[int], leg: str, encodes: bool) -> dict[int, ShardMessage]:
        """The messages of these shards, with one codec object for all segments of a codec."""
        members: dict[str, list[int]] = {}
        for shard in shards:
            for i in self._segments_of(shard):
                members.setdefault(self.segments[i][leg], []).append(i)
        parts: dict[int, list[Part]] = {shard: [] for shard in shards}
        for text, indices in sorted(members.items()):
            codec = self._codec(text, indices, encodes)
            first = 0
            for shard in shards:
                those = tuple(i for i in indices if self.segments[i]["owner"] == shard)
                if those:
                    parts[shard].append(Part(codec, first, first + len(those), those))
                    first += len(those)
        return {shard: ShardMessage(parts[shard], self.rank, self.device) for shard in shards}

    def _codec(self, text: str, segments: Sequence[int], encodes: bool) -> SegmentCodec:
        spans = [
            Span(info["bucket_offset"], info["numel"], self._streams[i])
            for i, info in ((i, self.segments[i]) for i in segments)
        ]
        return SegmentCodec(text, spans, self.device, self._scratch, encodes)

    def _segments_of(self, shard: int) -> list[int]:
        return [i for i, segment in enumerate(self.segments) if segment["owner"] == shard]

    def _runs_of(self, shard: int) -> list[slice]:
        runs: list[slice] = []
        for i in self._segments_of(shard):
            begin = self.segments[i]["bucket_offset"]
            end = begin + self.segments[i]["numel"]
            if runs and runs[-1].stop == begin:
                begin = runs.pop().start
            runs.append(slice(begin, end))
        return runs


def parts_of(messages: dict[int, ShardMessage]) -> list[Part]:
    return [part for message in messages.values() for part in message.parts]


def to_host(tensors: Sequence[torch.Tensor]) -> list[Words]:
    """One-dimensional int64 tensors, in one transfer. Waits for the device."""
    together = torch.cat(list(tensors)).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    return np.split(together, ends[:-1])
