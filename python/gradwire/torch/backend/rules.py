"""Which collectives a process group compresses, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.torch.records.exchange_settings import (
    RAW_CODECS,
    ExchangeSettings,
    without_feedback,
)
from gradwire.torch.session.reduction import Op, is_reduction

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
MARK = "(whether values are finite)"  # a tensor beside them, which goes raw
_LEGS = {ALL_REDUCE: None, REDUCE_SCATTER: "reduce_scatter", ALL_GATHER: "allgather"}


@dataclass(frozen=True)
class Rules:
    """See register_backend."""

    codecs: dict[str, str | None]  # of each operation; None: not compressed
    min_numel: int
    dtypes: Sequence[torch.dtype]
    settings: ExchangeSettings
    keeps_residuals: bool = False  # for tensors in memory that is used again and again

    @staticmethod
    def of(
        codecs: dict[str, str | None],
        min_numel: int,
        dtypes: Sequence[torch.dtype],
        settings: ExchangeSettings,
        keeps_residuals: bool = False,
    ) -> Rules:
        """Raises ValueError or GradwireError for what can't be."""
        if min_numel < 1:
            raise ValueError(f"min_numel is {min_numel}; it is a number of values, at least 1")
        if unknown := [str(dtype) for dtype in dtypes if dtype not in RAW_CODECS]:
            valid = ", ".join(str(dtype) for dtype in RAW_CODECS)
            raise ValueError(f"dtypes has {', '.join(unknown)}; valid ones are {valid}")
        if not keeps_residuals:
            why = "a process group does not know whose values it gets"
            codecs = {op: codec and without_feedback(codec, why) for op, codec in codecs.items()}
        rules = Rules(codecs, min_numel, tuple(dtypes), settings, keeps_residuals)
        for op, codec in codecs.items():
            if codec is not None:
                rules.settings_of(op).check()
        return rules

    def settings_of(self, op: str) -> ExchangeSettings:
        """The settings of the exchange that takes the operation's place."""
        codec = self.codecs[op]
        assert codec is not None, "the operation is not compressed"
        return replace(
            self.settings, codec=codec, leg=_LEGS[op], min_numel=1, exclude=[MARK], chosen=None
        )

    def takes(self, op: str, values: torch.Tensor, reduction: Op | None = None) -> bool:
        """Whether this operation on these values (the larger of its two tensors) is compressed."""
        return (
            self.codecs[op] is not None
            and values.dtype in self.dtypes
            and values.numel() >= self.min_numel
            and values.is_contiguous()
            and values.layout == torch.strided
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
