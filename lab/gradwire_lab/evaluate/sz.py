"""SZ3 through its authors' package `pysz`: the successor of the lossy compressor in software with
which INCEPTIONN's section VI compares its card."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.errors import missing
from gradwire_lab.train.errors import TrainError

_TEXT = re.compile(r"sz3:bound=(\d{1,2})")
Values = NDArray[np.float32]


def bound_of(text: str) -> int | None:
    """b of `sz3:bound=b`, whose errors are at most 2^-b; None for another codec."""
    match = _TEXT.fullmatch(text)
    return int(match[1]) if match else None


def encode(values: Values, bound: int) -> bytes:
    """float32 (n,). Raises TrainError where pysz is not installed."""
    pysz = _package()
    config = pysz.szConfig()
    config.errorBoundMode = pysz.szErrorBoundMode.ABS
    config.absErrorBound = 2.0**-bound
    compressed, _ = pysz.sz.compress(values, config)
    return bytes(compressed)


def decode(data: bytes, numel: int) -> Values:
    """float32 (numel,), each at most 2^-bound from what was encoded."""
    values, _ = _package().sz.decompress(np.frombuffer(data, np.uint8), np.float32, (numel,))
    decoded: Values = values
    return decoded


def _package() -> Any:
    try:
        import pysz
    except ImportError as error:
        raise TrainError(missing("pysz", "'./lab[evaluate]'")) from error
    return pysz
