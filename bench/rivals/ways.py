"""What is compared: ways to train the same model, each with its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKERS, STEPS, EVERY = 4, 600, 30
LATENCY = 0.02  # seconds, one way
LINKS = ("10mbit", "100mbit", "1gbit")
# Losses: one that all ways come to, and about DDP's after 60 % of the steps.
TARGETS = (2.45, 2.1)
COMMON: Mapping[str, Any] = {
    "model": "gpt",
    "data": "text",
    "workers": WORKERS,
    "batch": 8,
    "optimizer": "adamw",
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "warmup": 50,
    "clip": 1.0,
}
_POWER_SGD_START = STEPS // 10  # "typically 10 % of the steps": the docstring of PowerSGDState


@dataclass(frozen=True)
class Way:
    """A row of the tables.

    codec: the laboratory's, with `settings` over COMMON. adapter: the module of this folder whose
    `choose` makes the Strategy instead of the laboratory's. environment: that in build/rivals in
    which it runs; empty: the repository's. period: steps from one exchange to the next.
    plain_steps: so many first steps go as plain DDP's.
    """

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    environment: str = ""
    period: int = 1
    plain_steps: int = 0
    ours: bool = False

    def whole_periods(self, steps: int) -> int:
        """At least so many steps, the last of which exchanges."""
        return -(-steps // self.period) * self.period

    @property
    def first_rate(self) -> float:
        """The first learning rate to be tried."""
        return float({**COMMON, **self.settings}["learning_rate"])

    def train_settings(self, steps: int, eval_every: int, **more: Any) -> dict[str, Any]:
        own = {"codecs": (self.codec,), "steps": steps, "eval_every": eval_every, **more}
        return {**COMMON, **self.settings, **own}


def _power_sgd(rank: int) -> Way:
    codec = f"torch:powersgd:rank={rank},start={_POWER_SGD_START}"
    return Way(codec, plain_steps=_POWER_SGD_START)


_UPDATES: Mapping[str, Any] = {"compress": "updates"}
_LOCAL: Mapping[str, Any] = {"learning_rate": 1e-3}
_SPARSE_EVERY = 10
_DILOCO: Mapping[str, Any] = {
    **_UPDATES, **_LOCAL, "every": EVERY, "outer": "nesterov", "outer_lr": 0.7
}  # fmt: skip
_SMALL = "3lc:s=1.00,coder=rice"


def _changes(codec: str, every: int = 1) -> Way:
    return Way(codec, {**_UPDATES, "every": every}, period=every, ours=True)


def _diloco(codec: str, **more: Any) -> Way:
    return Way(codec, {**_DILOCO, **more}, period=EVERY, ours=True)


BUCKETS = "torchft:buckets"  # with `use_bucketization`


def _torchft(codec: str, every: int = EVERY) -> Way:
    settings = {**_LOCAL, "every": every, "outer_lr": 0.7}
    return Way(codec, settings, "torchft_diloco", "torchft", every)


def _hivemind(every: int = EVERY) -> Way:
    return Way("hivemind", {"every": every}, "hivemind_averager", "hivemind", every)


def _flower(every: int = EVERY) -> Way:
    return Way("flower", {"every": every}, "flower_averaging", "flwr", every)


_SPARSE_LOCO = Way(
    "topk2bit:density=0.02",
    {
        **_UPDATES,
        "every": _SPARSE_EVERY,
        "outer": "sgd",
        "residual_decay": 0.95,
        "exchange": "broadcast",
    },
    period=_SPARSE_EVERY,
    ours=True,
)


BF16 = "DDP, bf16 hook"
DDP, POWER_SGD = "DDP", "PowerSGD, rank 4"
TORCHFT, TORCHFT_BUCKETS = "torchft, DiLoCo", "torchft, DiLoCo, buckets"
FLOWER = "Flower, FedAvg"
HIVEMIND, RAW, EIGHT_BITS = "hivemind, 8 bits", "DiLoCo, raw", "DiLoCo, int8"
CHANGES, HOOK = "compress, small", "hook, small"
SMALL = "DiLoCo, small"
WAYS: Mapping[str, Way] = {
    DDP: Way("ddp"),
    BF16: Way("torch:bf16"),
    **{f"PowerSGD, rank {rank}": _power_sgd(rank) for rank in (1, 2, 4, 8, 16, 32)},
    TORCHFT: _torchft("torchft"),
    TORCHFT_BUCKETS: _torchft(BUCKETS),
    "torchft, buckets, every=10": _torchft(BUCKETS, 10),
    HIVEMIND: _hivemind(),
    f"{HIVEMIND}, every=4": _hivemind(4),
    FLOWER: _flower(),
    **{f"{FLOWER}, every={every}": _flower(every) for every in (4, 2)},
    HOOK: Way(_SMALL, ours=True),
    CHANGES: _changes(_SMALL),
    "compress, small, every=2": _changes(_SMALL, 2),
    "compress, small, every=4": _changes(_SMALL, 4),
    "compress, half-byte": _changes("qsgd:bits=4"),
    "compress, raw": _changes("raw"),
    RAW: _diloco("raw"),
    SMALL: _diloco(_SMALL),
    "DiLoCo, half-byte": _diloco("qsgd:bits=4"),
    EIGHT_BITS: _diloco("int8"),
    "streaming, half-byte": _diloco("qsgd:bits=4", fragments=3, delay=5, mix=0.5),
    "SparseLoCo": _SPARSE_LOCO,
}

# Why not, and what it needs.
NOT_RUN: Mapping[str, tuple[str, str]] = {
    "DeepSpeed, 1-bit Adam": (
        "DeepSpeed 0.19.8 has no 1-bit optimizers any more",
        "an older version, and one of the transports that went with them",
    ),
    "DeepSpeed, ZeRO++": (
        'DeepSpeed 0.19.8 says "This op had not been implemented on CPU backend"',
        "a GPU",
    ),
    "PCCL with pi-quant": (
        "the library in pypccl 1.0.0 wants Python 3.12, glibc 2.38 and NVIDIA's driver",
        "Debian 13 with that driver, where this was measured on Debian 12",
    ),
    "THC": (
        "PyPI has no package of it; its paper is 1.28 to 1.47 times as fast to an accuracy",
        "GPUs, and BytePS or a programmable switch",
    ),
    "CGX": (
        "its kernels are CUDA's; its paper has up to 3 times the speed",
        "GPUs",
    ),
}
