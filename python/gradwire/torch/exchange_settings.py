"""How tensors are encoded and exchanged: the options of a way to train, checked together."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist

from gradwire import codecs, exchanges, parse_exchange
from gradwire._core import Exchange, Layout, ShardCodecs, is_goal, spell_out_codec
from gradwire.torch.checkpoint import Identity, in_full
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import NamedShape

RAW: str = next(info["name"] for info in codecs() if info["lossless"])

# The codec for raw tensors in buckets of each dtype. Pushes are exact; pulls are rounded as the
# bucket would be anyway.
RAW_CODECS = {torch.float32: RAW, torch.bfloat16: "bf16", torch.float16: "fp16"}


def _info(name: str) -> dict[str, Any]:
    return next(info for info in exchanges() if info["name"] == name)


# Of everything without a choice of exchange: shards and servers.
DEFAULT_CODEC: str = _info("sharded")["default_codec"]


@dataclass(frozen=True)
class ExchangeSettings(Execution, Members, Compression):
    """The options of an exchange, and what the way to train adds to them.

    `ranks_per_machine` (of exchanges between machines): None until the ranks have agreed on it.
    `chosen`: of `auto` texts: (direction, tensor, codec) of every tensor whose codec was chosen so
    far. None: such texts are refused, because nothing chooses.
    `last_excluded`: patterns of the layers that exclude_last means.
    `remedy`: what else can be done if the budget of an `auto` codec can't be kept (Chooser).
    `leg`: "reduce_scatter" or "allgather": only this leg of the sharded exchange, for buckets that
    FSDP2 made (Layout, rows).
    `update` (of exchanges with updates): called by each owner when the bucket holds its shard's
    averages, to turn them in place into the values that every rank gets.
    `terms`: further settings, as text, that the ranks compare before the first exchange.
    `of_changes`: whether warnings say "change" where they say "gradient" otherwise.
    """

    codec: str = DEFAULT_CODEC
    chosen: Sequence[tuple[str, str, str]] | None = ()
    last_excluded: Sequence[str] = ()
    remedy: str = ""
    leg: str | None = None
    update: Callable[[], None] | None = None
    terms: str = ""
    of_changes: bool = False

    @classmethod
    def of(
        cls, *records: Compression | Members | Execution, finer: Callable[[], str] = lambda: ""
    ) -> Self:
        """The checked settings.

        Args:
            records: With the options that were given.
            finer: The codec that the training needs in place of "small", where that is the default
                of the exchange; empty: none.

        Raises:
            GradwireError: Every bucket would fail with these settings.
            ValueError: Settings exclude each other.
        """
        given = {key: value for record in records for key, value in vars(record).items()}
        settings = cls(**given)
        if not settings.codec:
            usual = settings.inner_info["default_codec"]
            better = finer() if usual == DEFAULT_CODEC else ""
            settings = replace(settings, codec=better or usual)
        if in_text := settings.choice["ranks_per_machine"]:
            if settings.ranks_per_machine not in (None, in_text):
                raise ValueError(
                    f"ranks_per_machine is {settings.ranks_per_machine}, but exchange is "
                    f"'{settings.exchange}'"
                )
            settings = replace(settings, ranks_per_machine=in_text)
        settings.check()
        return settings

    def text(self) -> str:
        return self.codec if self.pull_codec is None else f"{self.codec}, pull {self.pull_codec}"

    def with_last_excluded(self, tensors: Sequence[NamedShape]) -> Self:
        """The settings for these tensors of a model, of which exclude_last means the last layers.

        A layer is a module whose own parameters include one of two or more dimensions. Raises
        ValueError if the model has fewer layers than exclude_last.
        """
        if self.exclude_last == 0:
            return self
        modules = [name.rpartition(".") for name, shape in tensors if len(shape) > 1]
        layers = list(dict.fromkeys(glob.escape(f"{m}.") + "*" if m else n for m, _, n in modules))
        if self.exclude_last > len(layers):
            raise ValueError(
                f"exclude_last is {self.exclude_last}; the model has {len(layers)} layers"
            )
        return replace(self, last_excluded=layers[-self.exclude_last :])

    def layout(self, tensors: Sequence[NamedShape], world_size: int, **more: Any) -> Layout:
        """more: arguments of Layout that are no options."""
        return Layout(
            tensors,
            world_size,
            self.codec,
            pull_codec=self.pull_codec,
            rules=self.rules,
            exclude=[*self.exclude, *self.last_excluded],
            min_numel=self.min_numel,
            chosen=self.chosen,
            **more,
        )

    def describe(self) -> list[str]:
        """The arguments that all ranks must be given alike, a line for each."""
        pull = self.pull_codec or self.codec
        rules = [(name, in_full(codec), *ways) for name, codec, *ways in self.rules]
        return [
            f"exchange {self.exchange}",
            f"codec push {in_full(self.codec)} pull {in_full(pull)}",
            f"rules {rules}",
            f"exclude {list(self.exclude)}",
            f"exclude_last {self.exclude_last}",
            f"min_numel {self.min_numel}",
            f"seed {self.seed}",
            *([self.terms] if self.terms else []),
        ]

    @property
    def goals(self) -> tuple[str, ...]:
        """The codecs that are `auto` texts."""
        codecs = [self.codec, self.pull_codec or "", *(rule[1] for rule in self.rules)]
        return tuple(filter(is_goal, codecs))

    def identity(
        self, source: str, rank: int, world_size: int, tensors: Sequence[NamedShape] | None
    ) -> Identity:
        """What states of `source` say of their origin. tensors: the model's, if they are known."""
        exchange = self.exchange if self.leg is None else self.leg
        return Identity(source, self.text(), rank, world_size, exchange, tensors)

    @cached_property
    def choice(self) -> dict[str, Any]:
        """`exchange`, parsed. Raises GradwireError listing the valid names and parameters."""
        return parse_exchange(self.exchange)

    @cached_property
    def info(self) -> dict[str, Any]:
        """The description of the exchange."""
        return _info(self.choice["name"])

    @property
    def inner_info(self) -> dict[str, Any]:
        """The description of the exchange among the ranks that keep residuals."""
        return _info(self.choice["inner"])

    def check(self) -> None:
        """Raises GradwireError for settings with which every bucket would fail, ValueError for
        settings that exclude each other. The world size matters only where it is known.
        """
        if self.info["has_servers"]:
            raise ValueError(
                f"exchange='{self.exchange}' has processes that are servers: take ServerOptimizer"
            )
        if self.goals and not self.info["chooses_codecs"]:
            choosing = " or ".join(info["name"] for info in exchanges() if info["chooses_codecs"])
            raise ValueError(
                f"an 'auto' codec goes with exchange='{choosing}' alone, where each rank sees what "
                f"it encodes; exchange is '{self.exchange}'"
            )
        probe = replace(self, ranks_per_machine=1)
        probe.make_exchange(probe.bucket_layout([("probe", [1])], 1), 0)
        world_size = dist.get_world_size(self.process_group) if dist.is_initialized() else 0
        known = world_size > 0  # it is unknown without a process group, and outside of it
        size = self.ranks_per_machine
        if size is not None and not self.info["between_machines"]:
            valid = [info["name"] for info in exchanges() if info["between_machines"]]
            raise ValueError(
                f"ranks_per_machine goes with exchange='{' or '.join(valid)}' alone, not with "
                f"'{self.exchange}'"
            )
        if size is not None:
            check_machines(size, world_size if known else max(size, 1), "ranks_per_machine")
        if self.info["adds_trits"]:
            # The pulls' number of levels depends on the world size.
            probe = self if known else replace(self, pull_codec=None)
            probe._check_trits(world_size if known else 1)

    def machines(self, world_size: int) -> int:
        """How many ranks exchange with each other: one rank of each machine, or all ranks."""
        if not self.info["between_machines"]:
            return world_size
        assert self.ranks_per_machine is not None, "the ranks agree on it before the first bucket"
        return world_size // self.ranks_per_machine

    def bucket_layout(
        self,
        tensors: Sequence[NamedShape],
        world_size: int,
        raw_codec: str = RAW,
        raw: bool = False,
    ) -> Layout:
        machines, rows = self.machines(world_size), self.leg is not None
        if raw:
            return Layout(tensors, machines, RAW, raw_codec=raw_codec, rows=rows)
        return self.layout(tensors, machines, raw_codec=raw_codec, rows=rows)

    @property
    def within_info(self) -> dict[str, Any] | None:
        """The description of the exchange inside a machine; None: each rank talks to the first."""
        return _info(self.choice["within"]) if self.choice["within"] else None

    def make_exchange(
        self, layout: Layout, rank: int, shard_codecs: ShardCodecs | None = None, raw: bool = False
    ) -> Exchange:
        """`layout`, `raw`: of bucket_layout. `shard_codecs`: for buckets on a device."""
        work: dict[str, Any] = {
            "threads": self.threads,
            "target": self.target,
            "seed": self.seed,
            "shard_codecs": shard_codecs,
        }
        if self.leg is not None:
            leg: Exchange = getattr(Exchange, self.leg)(layout, rank, **work)
            return leg
        machine_of_rank = None
        if self.info["between_machines"]:
            assert self.ranks_per_machine is not None, "its layout was made with it"
            world = range(layout.workers * self.ranks_per_machine)
            machine_of_rank = [r // self.ranks_per_machine for r in world]
        name = self.choice["uncompressed"] if raw else self.exchange
        return Exchange(
            layout, rank, name, update=self.update, machine_of_rank=machine_of_rank, **work
        )

    def _check_trits(self, world_size: int) -> None:
        # The lossless codec is there for comparisons.
        valid = [c["name"] for c in codecs() if c["shares_scales"] or c["lossless"]]
        if self.codec.partition(":")[0] not in valid:
            raise ValueError(
                f"exchange='{self.exchange}' adds trits without decoding them: codec is "
                f"'{self.codec}', valid are {' and '.join(valid)} (rules= may name others without "
                "residual)"
            )
        # A tensor for each rule, as a pattern matches its own text, and "*" for the codec itself.
        names = dict.fromkeys([*(rule[0] for rule in self.rules), "*"])
        tensors = [(name, [2, max(self.min_numel, 1)]) for name in names]
        self.make_exchange(self.bucket_layout(tensors, world_size), 0)


def check_machines(ranks_per_machine: int, world_size: int, origin: str) -> None:
    """Raises ValueError unless the number divides the world. `origin`: its name in the message."""
    if ranks_per_machine < 1 or world_size % ranks_per_machine:
        raise ValueError(
            f"{origin} is {ranks_per_machine}; {world_size} ranks can be on machines of "
            f"{', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}"
        )


def without_feedback(codec: str, why: str) -> str:
    """The codec without error feedback, for values that no later step completes. `why`: begins the
    ValueError for a codec with ef=on."""
    codec = spell_out_codec(codec)
    name, _, given = codec.partition(":")
    parameters = [text for text in given.split(",") if text]
    if "ef=on" in parameters:
        raise ValueError(f"{why}, so '{codec}' can't have ef=on")
    info = next((info for info in codecs() if info["name"] == name), None)
    if info is None or not info["error_feedback"] or "ef=off" in parameters:
        return codec
    return f"{name}:{','.join([*parameters, 'ef=off'])}"
