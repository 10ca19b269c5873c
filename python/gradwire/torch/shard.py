"""The part of a model that this rank owns, and the optimizer that steps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire._core import Exchange, Layout
from gradwire.torch.replica import NamedParameter

# These step a tensor as a whole, or ask for the loss again, or for sparse gradients.
_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
_OF_GROUPS_ONLY = ("params", "param_names")

Options = list[dict[str, Any]]  # of each group


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ValueError for one that can't step a piece of a tensor alone, or has stepped."""
    name = type(optimizer).__name__
    if name in _NOT_ELEMENTWISE:
        raise ValueError(f"{name} does not step every element for itself: it can't be sharded")
    if optimizer.state:
        raise ValueError(
            f"the {name} has taken steps already: its state is that of whole tensors. Wrap a new "
            "one, and load a checkpoint that a ShardedOptimizer saved"
        )


def options_of(param_groups: Sequence[dict[str, Any]]) -> Options:
    """Everything of the groups but their parameters."""
    return [
        {key: value for key, value in group.items() if key not in _OF_GROUPS_ONLY}
        for group in param_groups
    ]


@dataclass(frozen=True)
class Piece:
    """A run of one parameter's values, from its flattened element `offset` on.

    values    what this rank holds exactly, and its optimizer steps
    in_bucket where its average comes in and its change goes out
    is_owed   what the codec leaves out is kept in a residual and goes out later. Without one the
              owner takes over what everyone got: it has nothing to catch up with
    """

    name: str
    offset: int
    parameter: nn.Parameter
    values: nn.Parameter
    in_bucket: torch.Tensor
    is_owed: bool

    @property
    def in_replica(self) -> torch.Tensor:
        """The same values of the model itself, to be read."""
        whole = self.parameter.detach().reshape(-1)
        return whole[self.offset : self.offset + self.values.numel()]


class Shard:
    """Pieces of parameters, each of them a parameter of `optimizer`, in the same groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.pieces: list[Piece] = []

    def take(
        self,
        named: Sequence[NamedParameter],
        layout: Layout,
        exchange: Exchange,
        bucket: torch.Tensor,
        rank: int,
    ) -> None:
        """Cuts the optimizer's parameters down to what `rank` owns in the layout."""
        parameters = dict(named)
        owed = {
            (r["name"], r["offset"]) for r in exchange.export_residuals() if r["kind"] == "pull"
        }
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
                (name, offset) in owed,
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

        Averages that are not finite stay: no rank applies a step that holds one.
        """
        if not all(bool(torch.isfinite(piece.in_bucket).all()) for piece in self.pieces):
            return
        before = [piece.values.detach().clone() for piece in self.pieces]
        for piece in self.pieces:
            piece.values.grad = piece.in_bucket
        self.optimizer.step()
        for piece, old in zip(self.pieces, before, strict=True):
            piece.values.grad = None
            torch.sub(piece.values, old, out=piece.in_bucket)
            if not bool(torch.isfinite(piece.in_bucket).all()):
                raise FloatingPointError(
                    f"{type(self.optimizer).__name__} made {piece.name} NaN or infinite, from a "
                    "finite gradient"
                )

    @torch.no_grad()
    def follow(self) -> None:
        """After a step: what the codec left out for good is left out here, too."""
        for piece in self.pieces:
            if not piece.is_owed:
                piece.values.copy_(piece.in_replica)

    def state_bytes(self) -> int:
        """Of the optimizer's tensors with a value for each element: momentum, moments."""
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
        """Raises ValueError if it is that of other pieces."""
        saved = [(p["name"], p["offset"], p["values"].numel()) for p in state["pieces"]]
        here = [(p.name, p.offset, p.values.numel()) for p in self.pieces]
        if saved != here:
            raise ValueError(f"the state is that of the pieces {saved}, this rank owns {here}")
        self.optimizer.load_state_dict(state["optimizer"])
        for piece, entry in zip(self.pieces, state["pieces"], strict=True):
            piece.values.copy_(entry["values"])
