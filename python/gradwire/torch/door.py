"""`compress`: one door to the ways to train with a compressed exchange."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.argument_types import check_types
from gradwire.option_record import describe_unknown, explains_arguments
from gradwire.torch.hook.ddp_module import require_unhooked
from gradwire.torch.hook.gradwire_state import GradwireState, gradwire_hook
from gradwire.torch.live import ScalarWriter
from gradwire.torch.optimizer_list import Optimizers, each_parameter, name_of
from gradwire.torch.optimizers.local_steps import LocalSteps
from gradwire.torch.parameters import is_sharded, uncompiled


class Compressed(Protocol):
    """What every way to train has."""

    @property
    def error(self) -> Exception | None:
        """The error that ended the communication; after it no step can be taken."""

    def stats(self) -> Any:
        """Counters over all steps of this rank; as text it is a report."""

    def scalars(self) -> dict[str, float]:
        """The last step and the sums so far, as plain numbers (docs/reference/live.md)."""

    def log_to(self, writer: ScalarWriter, *, every: int = 10) -> None:
        """Writes `scalars()` to a SummaryWriter."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; every rank saves its own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; every rank loads its own."""

    def close(self) -> None:
        """Ends the communication."""


@explains_arguments
def compress(
    model: nn.Module, optimizer: Optimizers, codec: str | None = None, **options: Any
) -> Any:
    """Compresses what training `model` with `optimizer` sends, in the way that fits both.

        optimizer = gradwire.torch.compress(model, torch.optim.AdamW(model.parameters()), every=4)

    A model in DistributedDataParallel gets `gradwire_hook`; one that `fully_shard` has sharded gets
    a FullyShardComm. For these, go on with your optimizer. A plain model gets LocalSteps, which
    takes the optimizer's place: step the result. Rank 0 says on stderr which way it is, and why.

    Args:
        model: On every rank, after DistributedDataParallel or the last call of `fully_shard`. It
            may be compiled.
        optimizer: Of its parameters, or several in a list, such as Muon and AdamW.
        codec: As text, or one of the names "small", "safe" and "half-byte". None: "small" where it
            suits the optimizer and `every`, else one of the others.
        options: Further arguments of the class that is taken.

    Returns:
        A GradwireState, a FullyShardComm or a LocalSteps; see Compressed for what they share.

    Raises:
        TypeError: The class that is taken lacks an option, or an option is of another type.
        RuntimeError: The model in DistributedDataParallel has a hook.
        Further errors: Those of its constructor.
    """
    way: type[Any]
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        way, why = GradwireState, "the model is in DistributedDataParallel"
    elif any(map(is_sharded, model.parameters())) or _is_of_fsdp(inner):
        from gradwire.torch.fsdp.fully_shard_comm import FullyShardComm

        way, why = FullyShardComm, "fully_shard has sharded the model"
    else:
        way, why = LocalSteps, "each rank can step the plain model itself"
    check_options("compress", options, way, why)
    if isinstance(inner, DistributedDataParallel):
        require_unhooked(inner, "compress")
    if way is not LocalSteps:  # which refuses an optimizer of any other parameter itself
        _require_common(model, optimizer)
    made = way(model=model, optimizer=optimizer, codec=codec, **options)
    if isinstance(inner, DistributedDataParallel):
        inner.register_comm_hook(made, gradwire_hook)
    if (made.rank if isinstance(made, LocalSteps) else dist.get_rank()) == 0:
        stats: Any = made.stats()
        codec = getattr(stats, "exchanges", stats).codec  # of LocalSteps, and of the others
        found = f"{way.__name__} with {codec} for {name_of(optimizer)}"
        print(f"gradwire: {found}, because {why}", file=sys.stderr)
    return made


def _is_of_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` has it, though a forward pass may have gathered its parameters. (By its
    name: its module takes long to import.)"""
    return any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)


def _require_common(model: nn.Module, optimizer: Optimizers) -> None:
    """Raises ValueError for an optimizer that steps no parameter of the model."""
    stepped = [parameter for _, _, parameter in each_parameter(optimizer)]
    if any(map(is_sharded, stepped)):  # the model itself may be gathered
        return
    if {id(parameter) for parameter in stepped}.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"the {name_of(optimizer)} steps no parameter of the model. fully_shard puts others in "
            "their place, and so may DistributedDataParallel: make the optimizer after it"
        )


def check_options(owner: str, options: Mapping[str, Any], way: type, why: str) -> None:
    """Raises TypeError for an option that the way lacks, or that is of another type, which the user
    gave to `owner`."""
    known, local = (
        {name: p.default for name, p in inspect.signature(each).parameters.items()}
        for each in (way, LocalSteps)
    )
    for name in options:
        if name not in known and name in local:
            raise TypeError(
                f"{name} is for LocalSteps, and {owner} takes {way.__name__}, because {why}"
            )
        if name not in known:
            raise TypeError(describe_unknown(owner, name, known))
    check_types(way.__init__, options)  # type: ignore[misc] # it is that of this class
