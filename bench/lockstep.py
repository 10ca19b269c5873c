"""All ranks of an exchange in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradwire._core import Exchange


def average(
    ranks: Sequence[Exchange], buckets: Sequence[npt.NDArray[np.float32]], step: int = 0
) -> None:
    """Averages the buckets in place: each message arrives as soon as it is ready."""
    for rank, bucket in zip(ranks, buckets, strict=True):
        rank.start(bucket, step)
    while not all(rank.done for rank in ranks):
        for source, rank in enumerate(ranks):
            for peer, message in rank.outgoing():
                ranks[peer].receive(source, message)
