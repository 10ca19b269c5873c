"""The sharded exchange for buckets on a device: the algorithm, without input or output.

The same steps, bits and residuals as `gradwire._core.Exchange(kind="sharded")` on the CPU, with
messages of another form, which stay on the device (device_message.py). A step is a generator: it
yields what is to be sent, and is sent what came. All work is queued on the device's current stream.

`captured` is the same step for a CUDA graph, in which nothing can look at the device: all sizes are
fixed, and what `average` decides on the host is computed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire._core import GradwireError, Layout
from gradwire.torch.device_codec import SegmentCodec
from gradwire.torch.device_message import Origin, ShardMessage, Words, sizes_in
from gradwire.torch.device_replays import Replays
from gradwire.torch.device_shards import DeviceShards, to_host
from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.stats import COUNTED_BY_EXCHANGE

_ERROR_NORM_INTERVAL = 64  # a step in so many is measured, as on the CPU


@dataclass(frozen=True)
class Push:
    """To rank k the next `lengths[k]` bytes of `message`; none to this rank itself.

    `expected`: the lengths of what comes, or None where only its senders know them.
    """

    message: torch.Tensor
    lengths: list[int]
    expected: list[int] | None


@dataclass(frozen=True)
class Pull:
    """The whole message to every rank; what comes includes it, in this rank's place."""

    message: torch.Tensor
    expected: list[int] | None


@dataclass(frozen=True)
class Received:
    """Of rank k: `lengths[k]` bytes of `data` (uint8, on the device) from `begins[k]` on, which is
    a multiple of 8.
    """

    data: torch.Tensor
    begins: list[int]
    lengths: list[int]


Step = Generator[Push | Pull, Received, None]


class DeviceExchange:
    """One rank's part. Arguments as those of `gradwire._core.Exchange`, the bucket's device, and
    the `replays` that the buckets of a step share.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        replays: Replays,
        *,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self.non_finite: dict[str, Any] | None = None
        self._shards = DeviceShards(layout, rank, device, seed)
        self._counters: dict[str, Any] = dict.fromkeys(COUNTED_BY_EXCHANGE, 0)
        self._steps = 0
        self._voided: set[int] = set()  # shards that are NaN in this step
        self._sent: set[int] = set()  # shards that this rank has encoded in this step
        self._heads: dict[int, torch.Tensor] = {}  # of the messages of what it encoded
        self._sizes: dict[int, Words] = {}  # of their payloads
        self._captures = False
        self._replays = replays
        # The shards that were NaN in the last captured step, on the device.
        self._void = torch.zeros(layout.workers, dtype=torch.bool, device=device)

    def describe(self) -> str:
        device = self._shards.device.type
        return f"exchange sharded, messages on {device}\n{self.layout.describe()}"

    def average(self, bucket: torch.Tensor, step: int) -> Step:
        """Averages `bucket` (float32, flat, on the device) in place. Waits for the device.

        Raises PeerMismatchError for a message of another form, GradwireError (corrupt_payload).
        """
        shards = self._shards
        self._steps += 1
        self.non_finite = None
        self._voided.clear()
        self._sent.clear()
        if self._captures:
            self._take_back()
        if shards.world_size == 1:
            if shards.keeps_residuals and shards.find_non_finite(bucket, [0]) is None:
                shards.residuals.pay(bucket)
            return
        # Looked at first, as a whole: a step that will be skipped must not touch any residual here.
        origin = shards.find_non_finite(bucket, range(shards.world_size))
        if origin is None:
            origin = self._encode(bucket, shards.peers, step)
        if origin is None:
            self._sample_error_norm(bucket)
        push = self._push(origin)
        self._counters["push_bytes"] += sum(push.lengths)
        received = yield push
        origin = self._add_pushes(bucket, received, origin)
        if origin is None:
            origin = shards.find_non_finite(bucket, [shards.rank])
        if origin is None:
            origin = self._encode(bucket, [shards.rank], step)
        pull = Pull(torch.cat(self._pieces(shards.rank, origin)), self._pulled_lengths())
        self._counters["pull_bytes"] += len(shards.peers) * pull.message.numel()
        self._counters["pull_packet_bytes"] += pull.message.numel()
        received = yield pull
        self._store_pulls(bucket, received)

    def _encode(self, bucket: torch.Tensor, these: Sequence[int], step: int) -> Origin | None:
        """Encodes these shards; where they are not finite, what was encoded is put back."""
        begun = time.perf_counter()
        shards = self._shards
        shards.encode(bucket, these, step)
        self._heads |= {shard: shards.encoded[shard].head() for shard in these}
        heads = to_host([self._heads[shard] for shard in these])
        self._sizes |= {shard: sizes_in(head) for shard, head in zip(these, heads, strict=True)}
        origin = next(filter(None, map(Origin.in_head, heads)), None)
        if origin is None:
            self._sent.update(these)
            leg = "values_pulled" if shards.rank in these else "values_pushed"
            sent = [i for shard in these for i in shards.encoded[shard].segments]
            self._counters[leg] += sum(shards.segments[i]["numel"] for i in sent)
        else:
            shards.put_back(these)
        self._counters["encode_seconds"] += time.perf_counter() - begun
        return origin

    def _push(self, origin: Origin | None) -> Push:
        shards = self._shards
        lengths = [0] * shards.world_size
        pieces = []
        for peer in shards.peers:
            of_peer = self._pieces(peer, origin)
            lengths[peer] = sum(piece.numel() for piece in of_peer)
            pieces += of_peer
        return Push(torch.cat(pieces), lengths, self._pushed_lengths())

    def _pieces(self, shard: int, origin: Origin | None) -> list[torch.Tensor]:
        message = self._shards.encoded[shard]
        if origin is not None:
            return message.marker(origin)
        return message.pieces(self._heads[shard], self._sizes.get(shard))

    def _pushed_lengths(self) -> list[int] | None:
        """Known on every rank, or on none."""
        shards = self._shards
        assert shards.pushed is not None, "a lone rank gets nothing"
        if _known([shards.encoded[peer].fixed_length for peer in shards.peers]) is None:
            return None
        length = shards.pushed.fixed_length
        return _known([0 if k == shards.rank else length for k in range(shards.world_size)])

    def _pulled_lengths(self) -> list[int] | None:
        return _known([message.fixed_length for message in self._shards.pulled.values()])

    def _add_pushes(
        self, bucket: torch.Tensor, received: Received, origin: Origin | None
    ) -> Origin | None:
        """Makes this rank's shard the average, unless it or a push is not finite."""
        begun = time.perf_counter()
        shards = self._shards
        message, heads = self._pushed_heads(received)
        (on_host,) = to_host([heads.view(-1)])
        for peer, head in zip(shards.peers, on_host.reshape(heads.shape), strict=True):
            _check(message, peer, head, received.lengths[peer])
            origin = origin or Origin.in_head(head)
        self._counters["received_bytes"] += sum(received.lengths)
        if origin is None:
            verdicts = self._decode_pushes(bucket, received, heads)
            _require_valid(verdicts, "a push to this rank")
        self._counters["decode_seconds"] += time.perf_counter() - begun
        return origin

    def _store_pulls(self, bucket: torch.Tensor, received: Received) -> None:
        begun = time.perf_counter()
        shards = self._shards
        heads = self._pulled_heads(received)
        for (shard, message), head in zip(shards.pulled.items(), to_host(heads), strict=True):
            _check(message, shard, head, received.lengths[shard])
            origin = Origin.in_head(head)
            if origin is not None:
                self._voided.add(shard)
                self.non_finite = self.non_finite or shards.place_of(origin)
        self._counters["received_bytes"] += sum(received.lengths) - received.lengths[shards.rank]
        verdicts = self._decode_pulls(bucket, received, heads)
        if not self._voided:
            _require_valid(verdicts, "a pull")
        for run in (run for shard in self._voided for run in shards.runs[shard]):
            bucket[run].fill_(torch.nan)
        self._counters["decode_seconds"] += time.perf_counter() - begun

    def _pushed_heads(self, received: Received) -> tuple[ShardMessage, torch.Tensor]:
        message = self._shards.pushed
        assert message is not None, "a lone rank gets nothing"
        begins = [received.begins[peer] for peer in self._shards.peers]
        return message, message.heads_in(received.data, begins)

    def _decode_pushes(
        self, bucket: torch.Tensor, received: Received, heads: torch.Tensor
    ) -> list[torch.Tensor]:
        """Makes this rank's shard the average."""
        shards = self._shards
        message = shards.pushed
        assert message is not None, "a lone rank gets nothing"
        begins = shards.on_device([received.begins[peer] for peer in shards.peers])
        return [
            part.codec.decode(
                received.data, of_part, bucket, accumulate=True, divisor=shards.world_size
            )
            for part, of_part in zip(message.parts, message.places(heads, begins), strict=True)
        ]

    def _pulled_heads(self, received: Received) -> list[torch.Tensor]:
        return [
            message.heads_in(received.data, [received.begins[shard]])[0]
            for shard, message in self._shards.pulled.items()
        ]

    def _decode_pulls(
        self,
        bucket: torch.Tensor,
        received: Received,
        heads: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        begins = self._shards.on_device(received.begins)
        places: dict[SegmentCodec, list[torch.Tensor]] = {}
        for shard, message in self._shards.pulled.items():
            of_parts = message.places(heads[shard][None], begins[shard : shard + 1])
            for part, of_part in zip(message.parts, of_parts, strict=True):
                places.setdefault(part.codec, []).append(of_part)
        return [
            codec.decode(received.data, torch.cat(of_codec, 1), bucket, accumulate=False)
            for codec, of_codec in places.items()
        ]

    def _sample_error_norm(self, bucket: torch.Tensor) -> None:
        if self._steps % _ERROR_NORM_INTERVAL != 1:
            return
        begun = time.perf_counter()
        norm = self._shards.error_norm(bucket)
        if norm is not None:
            self._counters["error_norm_sum"] += norm
            self._counters["error_norm_samples"] += 1
        self._counters["encode_seconds"] += time.perf_counter() - begun

    # A step in a CUDA graph ---------------------------------------------------------------------

    def captured(self, bucket: torch.Tensor) -> Step:
        """Averages `bucket` in place, without a look at the device or at what is in the bucket.

        Where a value is not finite, the whole bucket becomes NaN on every rank, and the next step
        puts back what the buckets of this one sent. Raises RuntimeError for codecs that do not go.
        """
        self._check_capture()
        self._captures = True
        shards, own = self._shards, self._shards.rank
        if shards.world_size == 1:
            return
        self._take_back()
        shards.encode(bucket, shards.peers, 0)
        self._heads |= {peer: shards.encoded[peer].head() for peer in shards.peers}
        received = yield self._push(None)
        _, pushed = self._pushed_heads(received)
        self._decode_pushes(bucket, received, pushed)
        owed = shards.residuals.copies(shards.runs[own])
        shards.encode(bucket, [own], 0)
        head = shards.encoded[own].head()
        bad = pushed[:, 0] >= 0
        first = pushed.index_select(0, bad.int().argmax(keepdim=True))[0]
        head[:2] = torch.where(bad.any(), first[:2], head[:2])
        shards.residuals.restore(owed, where=head[0] >= 0)
        pieces = shards.encoded[own].pieces(head, None)
        received = yield Pull(torch.cat(pieces), self._pulled_lengths())
        heads = self._pulled_heads(received)
        self._decode_pulls(bucket, received, heads)
        self._void.copy_(torch.stack([head[0] >= 0 for head in heads]))
        self._replays.note(self._void.any())
        bucket += torch.where(self._void.any(), torch.nan, -0.0)  # -0 changes no bit

    def _check_capture(self) -> None:
        shards = self._shards
        for codec in shards.codecs_of(shards.encoded):
            if not codec.has_fixed_sizes:
                why = "the sizes of its payloads differ from step to step: take coder=none"
            elif codec.draws:
                why = "every replay would draw the same random numbers"
            elif codec.residual_dtype not in (None, torch.float32):
                why = "its residual is not float32"
            else:
                continue
            raise RuntimeError(f"{codec.text} can't be captured in a CUDA graph: {why}")

    def _take_back(self) -> None:
        """After a captured step that was not applied, as `retract` does."""
        shards = self._shards
        back = self._void.clone()
        back[shards.rank] = self._replays.skipped & ~self._void[shards.rank]
        for codec in shards.codecs_of(shards.encoded):
            if codec.residual_dtype is not None:
                places = codec.places()
                places[0, :, 1] *= back.index_select(0, shards.owners_of(codec))
                owed = shards.residuals.tensor(codec.residual_dtype)
                codec.decode(codec.payloads, places, owed, accumulate=True)
        self._void.zero_()

    # Between steps ------------------------------------------------------------------------------

    @property
    def keeps_residuals(self) -> bool:
        """Whether any segment has a residual on any rank."""
        return self._shards.keeps_residuals

    def retract(self) -> None:
        """Puts what the last step sent back into the residuals, after a step that nobody applied.

        What an owner took up of a push is in its average, and comes back with the pull it takes
        back.
        """
        own = self._shards.rank
        back = [shard for shard in sorted(self._sent) if shard == own or shard in self._voided]
        if back:
            self._shards.put_back(back)
        self._sent.clear()

    def scale_residuals(self, factor: float) -> None:
        self._shards.residuals.scale(factor)

    def export_residuals(self) -> list[dict[str, Any]]:
        if self._captures:
            self._take_back()
        return self._shards.residuals.export()

    def import_residual(
        self, kind: str, name: str, offset: int, values: npt.NDArray[np.float32]
    ) -> None:
        """As `gradwire._core.Exchange.import_residual`."""
        self._shards.import_residual(kind, name, offset, values)

    def stats(self) -> dict[str, Any]:
        """The counters of `gradwire._core.Exchange.stats` that engines add up."""
        return dict(self._counters)


def _check(message: ShardMessage, peer: int, head: Words, length: int) -> None:
    wrong = message.check(head, length)
    if wrong is not None:
        raise PeerMismatchError(f"a message of rank {peer} does not fit: {wrong}", (peer,))


def _require_valid(verdicts: Sequence[torch.Tensor], what: str) -> None:
    if verdicts and not bool(torch.cat(list(verdicts)).all()):
        error = GradwireError(f"{what} is corrupt: the codec does not make such payloads")
        error.code = "corrupt_payload"
        raise error


def _known(lengths: Sequence[int | None]) -> list[int] | None:
    known = [length for length in lengths if length is not None]
    return known if len(known) == len(lengths) else None
