"""What stands in the place of a codec, although gradwire has no part in it: DDP's own all-reduce,
and the compressing hooks that come with PyTorch.

    ddp                         DDP without a hook
    torch:bf16, torch:fp16      bf16_compress_hook, fp16_compress_hook
    torch:powersgd:rank=4,start=10
                                powerSGD_hook (Vogels et al. 2019) with error feedback and warm
                                start; the first `start` steps are uncompressed

This module needs no PyTorch; torch_ddp.py trains with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PLAIN_DDP = "ddp"  # without gradwire
BF16, FP16, POWERSGD = (f"torch:{name}" for name in ("bf16", "fp16", "powersgd"))
RIVALS = (PLAIN_DDP, BF16, FP16, f"{POWERSGD}:rank=4,start=10")
_OPTION = re.compile(r"(rank|start)=(\d{1,9})")


@dataclass(frozen=True)
class Rival:
    """rank, start: of PowerSGD."""

    name: str
    rank: int = 4
    start: int = 10

    @property
    def bits(self) -> float:
        """Bits of a value each way, for an estimate. Those of PowerSGD depend on the shapes."""
        return {PLAIN_DDP: 32.0, POWERSGD: 1.0 * self.rank}.get(self.name, 16.0)


def is_rival(codec: str) -> bool:
    return codec == PLAIN_DDP or codec.startswith("torch:")


def parse(codec: str) -> Rival:
    """Raises ValueError for text that is_rival takes but that is none of RIVALS."""
    if codec in (PLAIN_DDP, BF16, FP16):
        return Rival(codec)
    name, _, options = codec.removeprefix("torch:").partition(":")
    matches = [_OPTION.fullmatch(option) for option in options.split(",")] if options else []
    given = [(match[1], int(match[2])) for match in matches if match]
    values = dict(given)
    if f"torch:{name}" != POWERSGD or len(values) != len(matches):
        raise ValueError(f"unknown codec '{codec}'; valid are {', '.join(RIVALS)}")
    rival = Rival(POWERSGD, **values)
    if rival.rank < 1 or rival.start < 2:  # as PyTorch requires for error feedback
        raise ValueError(f"{codec}: valid are a rank from 1 and a start from 2")
    return rival
