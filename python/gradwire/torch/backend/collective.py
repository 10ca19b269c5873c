"""A collective as averages of rows, in memory of their own, and which ones are compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradwire.torch.buckets.bucket import Bucket, BucketJob
from gradwire.torch.buckets.reduction import Op, is_reduction
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings, without_feedback
from gradwire.torch.parameters import NamedShape, all_finite

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
MARK = "(whether values are finite)"  # a tensor beside them, which goes raw
_LEGS = {ALL_REDUCE: None, REDUCE_SCATTER: "reduce_scatter", ALL_GATHER: "allgather"}


@dataclass(frozen=True)
class Rules:
    """See register_backend. Raises ValueError or GradwireError for what can't be."""

    codecs: dict[str, str | None]  # of each operation; None: not compressed
    min_numel: int
    dtypes: Sequence[torch.dtype]
    settings: ExchangeSettings
    keeps_residuals: bool = False  # for tensors in memory that is used again and again

    def __post_init__(self) -> None:
        if self.min_numel < 1:
            raise ValueError(f"min_numel is {self.min_numel}; it is a number of values, at least 1")
        if unknown := [str(dtype) for dtype in self.dtypes if dtype not in RAW_CODECS]:
            valid = ", ".join(str(dtype) for dtype in RAW_CODECS)
            raise ValueError(f"dtypes has {', '.join(unknown)}; valid ones are {valid}")
        if not self.keeps_residuals:
            why = "a process group does not know whose values it gets"
            codecs = {op: c and without_feedback(c, why) for op, c in self.codecs.items()}
            object.__setattr__(self, "codecs", codecs)
        for op, codec in self.codecs.items():
            if codec is not None:
                self.settings_of(op).check()

    def settings_of(self, op: str) -> ExchangeSettings:
        """The settings of the exchange that takes the operation's place."""
        codec = self.codecs[op]
        assert codec is not None, "the operation is not compressed"
        return replace(
            self.settings, codec=codec, leg=_LEGS[op], min_numel=1, exclude=[MARK], chosen=None
        )

    def sent_as(self, op: str) -> torch.dtype:
        """See Collective."""
        name = (self.codecs[op] or "").partition(":")[0]
        return torch.float16 if name == "fp16" else torch.bfloat16

    def takes(self, op: str, values: torch.Tensor, reduction: Op | None = None) -> bool:
        """Whether this operation on these values (the larger of its two tensors) is compressed."""
        return (
            self.codecs[op] is not None
            and values.dtype in self.dtypes
            and values.numel() >= self.min_numel
            and values.layout == torch.strided
            and values.is_contiguous()
            and (reduction is None or is_reduction(reduction))
        )

    def describe(self) -> str:
        """What a user reads when the first group begins to compress."""
        ways = [f"{op} with {codec}" for op, codec in self.codecs.items() if codec is not None]
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return (
            f"gradwire compresses {', '.join(ways) or 'nothing'} (sums and averages of "
            f"{self.min_numel:,} values or more of {names}); all else is as before"
        )


@dataclass(frozen=True)
class Collective:
    """What a program has called.

    Most codecs send a tensor with NaN or Inf as NaN alone, and fp16 sends 70000 as Inf. Then all
    ranks must exchange anew, without a codec. They notice by the result, which all get; but from a
    reduce-scatter each rank gets its own row alone, so a mark goes with each row.

    Attributes:
        whole: The larger of the two tensors of the call.
        rows: 1, or a row for each rank, which owns it.
        fill: Writes what this rank gives into the rows.
        deliver: Writes the exchanged rows to where the caller expects them.
        factor: See BucketJob.
        sent_as: A finite value that this dtype can't hold may be sent as Inf.
    """

    op: str
    whole: torch.Tensor
    rows: int
    fill: Callable[[torch.Tensor], object]
    deliver: Callable[[torch.Tensor], object]
    factor: int = 1
    sent_as: torch.dtype = torch.bfloat16

    def job(self, step: int, raw: bool) -> BucketJob:
        """The rows, filled. Called in the communication thread."""
        columns = self._columns
        tensors: list[NamedShape] = [("values", [self.rows, columns])]
        if self.op == REDUCE_SCATTER:
            tensors.append((MARK, [self.rows, 1]))
        values = self.whole.new_empty(self.rows, columns + len(tensors) - 1)
        self.fill(values[:, :columns])
        if self.op == REDUCE_SCATTER:
            # 0 or NaN, for which the host needs no value.
            extremes = torch.stack(torch.aminmax(values[:, :columns]))
            values[:, columns] = extremes.to(self.sent_as).mul(0).sum()
        return BucketJob(step, tensors, values.view(-1), raw=raw, factor=self.factor)

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """Cuts the job's values into the rows, without marks."""
        return values.view(self.rows, -1)[:, : self._columns]

    def found_non_finite(self, bucket: Bucket, values: torch.Tensor, rank: int) -> bool:
        """Whether a rank gave NaN or Inf, or what was sent became infinite, so that the bucket's
        exchange may have made NaN or Inf of other values (on the host), too; equal on all ranks."""
        if self.op == REDUCE_SCATTER:
            return not all_finite(values.view(self.rows, -1)[rank, self._columns :])
        exchange = bucket.exchange
        if exchange.non_finite is None and not exchange.keeps_residuals:
            return not all_finite(values)
        return exchange.non_finite is not None

    @property
    def _columns(self) -> int:
        return self.whole.numel() // self.rows


class Memories:
    """Numbers tensors by the memory in which they lie, from 0 on, in the order of their first use.

    So DDP's buckets, which lie in the same memory in every step, keep their numbers. A tensor in
    memory that was released and given out again has a new number.
    """

    def __init__(self) -> None:
        # By storage, offset and length. A weak reference keeps the storage's address from being
        # given to another one.
        self._known: dict[tuple[int, int, int], tuple[StorageWeakRef, int]] = {}
        self._count = 0

    def number_of(self, values: torch.Tensor) -> int:
        storage = StorageWeakRef(values.untyped_storage())
        place = storage.cdata, int(values.storage_offset()), values.numel()
        if place not in self._known:
            self._known[place] = storage, self._count
            self._count += 1
        return self._known[place][1]

    def forget_released(self) -> list[int]:
        """The numbers of tensors whose memory was released since the last call."""
        released = [place for place, (storage, _) in self._known.items() if storage.expired()]
        return [self._known.pop(place)[1] for place in released]
