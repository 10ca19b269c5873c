"""gradwire compresses the tensors that distributed training sends.

    frame = gradwire.encode(x, "3lc:s=1.00")
    y = gradwire.decode(frame)

`Compressor` adds error feedback over steps; `gradwire.torch` trains with PyTorch, and
`gradwire.weights` sends versions of weights.
"""

from gradwire._core import (
    Compressor,
    GradwireError,
    NonFiniteWarning,
    __version__,
    codecs,
    decode,
    decode_into,
    encode,
    exchanges,
    inspect,
    max_encoded_size,
    parse_exchange,
    simd_targets,
)
from gradwire.errors import LimitError, LimitWarning

__all__ = [
    "Compressor",
    "GradwireError",
    "LimitError",
    "LimitWarning",
    "NonFiniteWarning",
    "__version__",
    "codecs",
    "decode",
    "decode_into",
    "encode",
    "exchanges",
    "inspect",
    "max_encoded_size",
    "parse_exchange",
    "simd_targets",
]
