"""What all ranks of a ServerOptimizer must have alike: settings, and the parts of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from gradwire._core import Layout
from gradwire.errors import warn_user
from gradwire.torch.errors import UnmatchedPatternWarning
from gradwire.torch.exchange_settings import RAW_CODECS
from gradwire.torch.network.transport import PART_BITS
from gradwire.torch.parameters import (
    NamedTensor,
    clean_name,
    device_of,
    is_sharded,
    name_parameters,
    shapes_of,
)
from gradwire.torch.server.buffers import ModelBuffers
from gradwire.torch.server.server_settings import INSTEAD, ServerSettings
from gradwire.torch.staging.moves import describe_values
from gradwire.torch.staging.stage import Stage, stage_for

# Smaller tensors share a message with those that follow on the same server: a message takes about
# as long as the encoding of so many values.
_SMALLEST_PART = 4096
_MOST_PARTS = 1 << PART_BITS  # that a message can number

PartPlan = tuple[Layout, Sequence[NamedTensor]]


@dataclass
class ServerPlan:
    """named, layout: of the whole model. parts: which each go their way. stage: of the model's
    device, on this rank. others: the model's parameters that the optimizer does not have, where
    they have names."""

    settings: ServerSettings
    named: Sequence[NamedTensor]
    layout: Layout
    parts: Sequence[PartPlan]
    buffers: ModelBuffers | None
    stage: Stage
    others: Sequence[NamedTensor] = ()

    def describe(self) -> str:
        """A line for each thing that must be alike. So must be the values of parameters that
        require no gradient: the servers send the others."""
        lines = [*self.settings.describe(), *(layout.describe() for layout, _ in self.parts)]
        lines += [] if self.buffers is None else [self.buffers.describe()]
        frozen = describe_values([pair for pair in self.others if not pair[1].requires_grad])
        return "\n".join([*lines, *(f"no server sends {line}" for line in frozen)])


def make_plan(
    settings: ServerSettings,
    optimizer: Optimizer,
    named_parameters: Iterable[NamedTensor] | None,
    buffers: ModelBuffers | None,
) -> ServerPlan:
    """Raises ValueError for a model that can't be exchanged as the settings say, TypeError for
    named parameters without names and for shards, and the errors of name_parameters."""
    if named_parameters is None and settings.exclude_last:
        raise ValueError("exclude_last needs the names: give named_parameters= or model=")
    pairs = None if named_parameters is None else _require_pairs(named_parameters)
    named = name_parameters(optimizer, pairs, tuple(RAW_CODECS))
    if any(is_sharded(tensor) for _, tensor in named):
        raise TypeError(
            "the model's parameters are DTensors, and each rank of a ServerOptimizer has whole "
            "ones: for fully_shard (FSDP2), FullyShardComm compresses what it sends"
        )
    settings = settings.with_last_excluded(shapes_of(named))
    layout = settings.layout_of(named)
    for pattern in layout.unmatched:
        text = f"no parameter matches {pattern!r}, which rules= or exclude= has"
        warn_user(text, UnmatchedPatternWarning)
    # (Without values no server has a tensor, and all have the model as one part.)
    is_divided = settings.is_tensorwise and layout.segments
    parts = _divide(settings, layout, named) if is_divided else [(layout, named)]
    stage = stage_for(device_of(named), takes_kernels=False)
    ours = {id(tensor) for _, tensor in named}
    others = [(clean_name(name), each) for name, each in pairs or () if id(each) not in ours]
    return ServerPlan(settings, named, layout, parts, buffers, stage, others)


def _require_pairs(given: Iterable[object]) -> list[NamedTensor]:
    """What is given, or TypeError."""
    pairs: list[NamedTensor] = []
    for pair in given:
        match pair:
            case (str() as name, torch.Tensor() as tensor):
                pairs.append((name, tensor))
            case _:
                raise TypeError(
                    f"named_parameters has a {type(pair).__name__} in it; pairs of a name and a "
                    "tensor are needed, as model.named_parameters() gives them"
                )
    return pairs


def _divide(
    settings: ServerSettings, whole: Layout, named: Sequence[NamedTensor]
) -> list[PartPlan]:
    """Tensors of one server that follow each other, and their layout."""
    gathered: list[tuple[int, list[NamedTensor]]] = []
    open_parts: dict[int, list[NamedTensor]] = {}  # by server
    owners = {segment["name"]: segment["owner"] for segment in whole.segments}
    for tensor in named:
        if (server := owners.get(tensor[0])) is None:  # it has no values
            continue
        if server not in open_parts:
            open_parts[server] = []
            gathered.append((server, open_parts[server]))
        open_parts[server].append(tensor)
        if sum(t.numel() for _, t in open_parts[server]) >= _SMALLEST_PART:
            del open_parts[server]
    lacking = set(range(settings.workers, settings.world_size)) - {s for s, _ in gathered}
    if lacking:
        raise ValueError(
            f"the model has too few tensors for {settings.servers} servers: rank {min(lacking)} "
            "has none"
        )
    if len(gathered) > _MOST_PARTS:
        raise ValueError(
            f"the model has {len(gathered)} parts, and at most {_MOST_PARTS} can be "
            f"exchanged one by one; {INSTEAD}"
        )
    # Those without values go with the first part, which is pushed last anyway.
    gathered[0][1].extend(tensor for tensor in named if tensor[0] not in owners)
    return [(settings.layout_of(part, owner=server), part) for server, part in gathered]
