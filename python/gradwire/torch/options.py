"""The records of options that the ways to train share. `Schedule` is the one for local steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire._core import spell_out_codec
from gradwire.errors import warn_deprecated
from gradwire.local_schedule import Schedule
from gradwire.option_record import OptionRecord

NEEDS_STORE = (
    "store=, where ranks meet although any of them may die, such as "
    "torch.distributed.TCPStore(host, port) of a process of its own, and ranks=, the number with "
    "which the training begins"
)


@dataclass(frozen=True)
class Compression(OptionRecord):
    """What is sent, and in which form.

    Args:
        codec: Of pushes and pulls, as text; `gradwire codecs` lists them. "small", "safe" and
            "half-byte" are names for three. "auto:bits=1" and "auto:error=0.3" choose at run time
            (docs/reference/auto.md). Empty: the default of the class.
        pull_codec: Another codec for pulls. None: that of pushes.
        rules: (pattern, codec) or (pattern, codec, "push" | "pull" | "both"): tensors whose name
            matches the pattern take that codec. The first match wins.
        exclude: Name patterns of tensors that go raw.
        exclude_last: So many layers at the end of the model go raw, in the order of its parameters.
        min_numel: Tensors with fewer values go raw, and so do all one-dimensional ones.
        exchange: How the ranks exchange: "sharded" (each rank averages a part), "ring",
            "broadcast", "terngrad" or "hierarchical" (one rank of each machine talks to the other
            machines); see docs/reference/exchanges.md.

    Raises:
        ValueError: `exclude_last` is negative. Codecs are checked where they are used.
    """

    codec: str = ""
    pull_codec: str | None = None
    rules: Sequence[tuple[str, ...]] = ()
    exclude: Sequence[str] = ()
    exclude_last: int = 0
    min_numel: int = 256
    exchange: str = "sharded"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exclude_last < 0:
            raise ValueError(f"exclude_last is {self.exclude_last}; it is a number of layers")
        spelled = {
            "codec": spell_out_codec(self.codec),
            "pull_codec": self.pull_codec and spell_out_codec(self.pull_codec),
            "rules": [(*r[:1], *map(spell_out_codec, r[1:2]), *r[2:]) for r in self.rules],
        }
        for name, value in spelled.items():
            object.__setattr__(self, name, value)

    def require_sharded(self) -> None:
        """Raises ValueError for a choice of exchange, which servers and shards do not have."""
        if self.exchange != "sharded":
            raise ValueError(
                f"exchange is '{self.exchange}', but here each rank or server sums a part: leave "
                "out exchange"
            )


@dataclass(frozen=True)
class Members(OptionRecord):
    """Who takes part.

    Args:
        process_group: None: the default group. Not with `store`.
        ranks_per_machine: For exchange="hierarchical": ranks 0 to k - 1 are on the first machine,
            and so on. None: LOCAL_WORLD_SIZE of torchrun, or found by host names.
        on_lost: "stop": every rank gets an error when one is lost. "continue": the others go on.
            The arguments below are for this alone.
        store: Where processes meet without a world of torch.distributed, so that they may join
            later: a store whose host outlives them, such as TCPStore(host, port) of a process of
            its own. It serves one training; another one needs a PrefixStore.
        ranks: So many processes begin.
        role: "worker" or "server" of a ServerOptimizer.
        min_ranks: For LocalSteps: with fewer ranks left, a PeerLostError ends the training on all
            of them.
        lost_after: Seconds without a heartbeat after which a process counts as lost.

    Raises:
        ValueError: The arguments exclude each other.
    """

    process_group: dist.ProcessGroup | None = None
    ranks_per_machine: int | None = None
    on_lost: str = "stop"
    store: Store | None = None
    ranks: int | None = None
    role: str | None = None
    min_ranks: int = 1
    lost_after: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_lost not in ("stop", "continue"):
            raise ValueError(f"on_lost is '{self.on_lost}'; valid are 'stop' and 'continue'")
        if self.role not in (None, "worker", "server"):
            raise ValueError(f"role is '{self.role}'; valid are 'worker' and 'server'")
        if not (math.isfinite(self.lost_after) and self.lost_after > 0):
            raise ValueError(f"lost_after is {self.lost_after}; it is a number of seconds")
        if self.ranks is not None and not 1 <= self.min_ranks <= self.ranks:
            raise ValueError(
                f"ranks is {self.ranks} and min_ranks {self.min_ranks}: at least one rank must go "
                "on, and no more can be asked for than begin"
            )
        joining = ("store", "ranks", "role", "min_ranks", "lost_after")
        names = [f"{name}=" for name in joining if name in self.changed()]
        if names and not self.goes_on:
            raise ValueError(
                f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} for ranks that come "
                "and go: give on_lost='continue', too, or leave out"
            )
        if names and (self.store is None or self.ranks is None):
            raise ValueError(f"{' and '.join(names)}: processes can join with {NEEDS_STORE}")
        if names and self.process_group is not None:
            raise ValueError(
                "with store= the ranks make groups of their own: leave out process_group"
            )

    @property
    def goes_on(self) -> bool:
        """Whether ranks that are lost do not end the training."""
        return self.on_lost == "continue"


MEMORIES = ("", "device", "host", "pinned")


@dataclass(frozen=True)
class Execution(OptionRecord):
    """How a rank computes. The bytes and the values depend on `seed` alone.

    Args:
        threads: For encoding and decoding on this rank. They are used for segments of more than a
            million values; below that, one thread is faster.
        target: SIMD target, see `gradwire.simd_targets()`.
        seed: Of the random numbers, for codecs that draw.
        timeout: Seconds to wait for a rank that is connected but silent. A rank that evaluates
            alone between two steps must have finished by then.
        memory: Where residuals lie, and the anchors of LocalSteps, for a model that is not on the
            CPU: "device", "host", or "pinned", page-locked memory of the host. The bytes that are
            sent and the results are the same; docs/reference/gpu.md says what each costs. Empty:
            anchors on the device, residuals where they are encoded.
        offload_residuals: Deprecated for memory="pinned".

    Raises:
        ValueError: No wait can have this `timeout`, `memory` is none of these, or both it and
            `offload_residuals` are given.
    """

    threads: int = 1
    target: str = "auto"
    seed: int = 0
    timeout: float = 600.0
    memory: str = ""
    offload_residuals: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload_residuals:
            if self.memory:
                raise ValueError(
                    f"offload_residuals=True and memory='{self.memory}' are given: leave out the "
                    "first, which is deprecated"
                )
            warn_deprecated("offload_residuals=True", "memory='pinned'", since="0.1")
            object.__setattr__(self, "offload_residuals", False)
            object.__setattr__(self, "memory", "pinned")
        if self.memory not in MEMORIES:
            raise ValueError(
                f"memory is '{self.memory}'; valid are 'device', 'host' and 'pinned', or nothing"
            )
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise ValueError(f"timeout is {self.timeout}; a positive number of seconds is needed")


RECORDS: dict[str, type[OptionRecord]] = {
    "compression": Compression,
    "schedule": Schedule,
    "members": Members,
    "execution": Execution,
}
# Options that the classes also take as plain keywords.
_PLAIN = ("codec", "exchange", "every", "gate", "process_group")


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names, such as those of a command line, as arguments of any way to train:
    those that stand in a record are put into it, and all others stay as they are."""
    arguments = dict(options)
    for keyword, record in RECORDS.items():
        names = {field.name for field in fields(record)}
        rare = {name for name in names if name in options} - set(_PLAIN)
        if rare:
            if keyword == "schedule":
                rare |= {"every"} & options.keys()  # the others are checked by it
            arguments[keyword] = record(**{name: arguments.pop(name) for name in rare})
    return arguments
