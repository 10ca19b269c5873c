"""The part of a model that this rank owns, and the optimizer that steps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire._core import Compressor, Layout
from gradwire.torch.records.parameters import all_finite

# These optimizers step a tensor as a whole, evaluate the loss again, or take sparse gradients.
_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer that cannot step a part of a tensor, or has stepped."""
    name = type(optimizer).__name__
    if name in _NOT_ELEMENTWISE:
        raise ValueError(f"{name} does not step each element by itself, so it can't be sharded")
    if optimizer.state:
        raise ValueError(
            f"the {name} has taken steps already, so its state is of whole tensors. Wrap a new "
            "one, and load a checkpoint that a ShardedOptimizer saved"
        )


def keeps_residuals(layout: Layout) -> bool:
    """Whether any of several ranks keeps a residual."""
    codecs = {s[key] for s in layout.segments for key in ("push_codec", "pull_codec")}
    return any(map(_keeps_residual, codecs))


def _keeps_residual(codec: str) -> bool:
    return Compressor(codec, 1).residual is not None


@dataclass(frozen=True)
class Piece:
    """Consecutive values of one parameter, from its flattened element `offset` on.

    values     the exact values, which this rank's optimizer steps
    in_bucket  their part of the bucket: first the average, then the change
    is_owed    whether a residual keeps the codec's error, to be sent later. Without a residual the
               owner takes over the values that every rank got
    """

    name: str
    offset: int
    parameter: torch.Tensor
    values: nn.Parameter
    in_bucket: torch.Tensor
    is_owed: bool

    @property
    def in_replica(self) -> torch.Tensor:
        """The same values in this rank's model, to be read."""
        whole = self.parameter.detach().reshape(-1)
        return whole[self.offset : self.offset + self.values.numel()]


class Shard:
    """The pieces that this rank owns. They replace the parameters in the groups of `optimizer`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.pieces: list[Piece] = []

    def take(
        self,
        parameters: Mapping[str, torch.Tensor],
        layout: Layout,
        bucket: torch.Tensor,
        rank: int,
        world_size: int,
    ) -> None:
        """Replaces the optimizer's parameters by the pieces that `rank` owns in the layout."""
        for segment in layout.segments:
            if segment["owner"] != rank:
                continue
            name, offset, size = segment["name"], segment["tensor_offset"], segment["numel"]
            start = segment["bucket_offset"]
            piece = Piece(
                name,
                offset,
                parameters[name],
                nn.Parameter(torch.empty(size)),
                bucket[start : start + size],
                world_size > 1 and _keeps_residual(segment["pull_codec"]),
            )
            piece.values.data.copy_(piece.in_replica)
            self.pieces.append(piece)
        for group in self.optimizer.param_groups:
            members = {id(parameter) for parameter in group["params"]}
            mine = [piece for piece in self.pieces if id(piece.parameter) in members]
            group["params"] = [piece.values for piece in mine]
            if "param_names" in group:
                group["param_names"] = [f"{piece.name}[{piece.offset}:]" for piece in mine]

    @torch.no_grad()
    def update(self) -> None:
        """Turns the shard's averaged gradients, in the bucket, into the model's changes.

        Changes nothing if an average is not finite: no rank applies such a step.
        """
        if not all(all_finite(piece.in_bucket) for piece in self.pieces):
            return
        before = [piece.values.detach().clone() for piece in self.pieces]
        for piece in self.pieces:
            piece.values.grad = piece.in_bucket
        self.optimizer.step()
        for piece, old in zip(self.pieces, before, strict=True):
            piece.values.grad = None
            torch.sub(piece.values, old, out=piece.in_bucket)
            if not all_finite(piece.in_bucket):
                raise FloatingPointError(
                    f"{type(self.optimizer).__name__} made {piece.name} NaN or infinite, from a "
                    "finite gradient"
                )

    @torch.no_grad()
    def follow(self) -> None:
        """After a step: takes over the model's values where no residual keeps the difference."""
        for piece in self.pieces:
            if not piece.is_owed:
                piece.values.copy_(piece.in_replica)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's tensors with a value for each element: momentum, moments."""
        tensors = [
            tensor
            for state in self.optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "pieces": [
                {"name": p.name, "offset": p.offset, "values": p.values.detach().clone()}
                for p in self.pieces
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state of other pieces."""
        saved = [(p["name"], p["offset"], p["values"].numel()) for p in state["pieces"]]
        here = [(p.name, p.offset, p.values.numel()) for p in self.pieces]
        if saved != here:
            raise ValueError(f"the state is that of the pieces {saved}, this rank owns {here}")
        self.optimizer.load_state_dict(state["optimizer"])
        for piece, entry in zip(self.pieces, state["pieces"], strict=True):
            piece.values.copy_(entry["values"])
