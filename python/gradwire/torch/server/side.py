"""What workers and servers have alike: the parts of the model, each with an exchange of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch

from gradwire._core import ServerSide, WorkerSide
from gradwire.torch import checkpoint
from gradwire.torch.network.transport import Kind, Limits
from gradwire.torch.server.group_options import unused_size
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import ServerLink

Exchange = TypeVar("Exchange", ServerSide, WorkerSide)


class Side(Generic[Exchange]):
    """One rank. The methods of its subclasses are called inside `ServerLink.guard`.

    parts, exchanges: of this rank, by the number that all ranks give to a part.
    """

    link: ServerLink
    peers: range  # the ranks of the other side

    def __init__(self, parts: dict[int, ServerPart], exchanges: dict[int, Exchange]) -> None:
        self.parts = parts
        self.exchanges: dict[int, Exchange] = exchanges
        # The first version that was not finite, and where.
        self.non_finite: tuple[int, dict[str, Any]] | None = None

    def _listen(self, link: ServerLink, limits: Limits) -> None:
        """Takes the messages of the peers over this link. `limits`: of all kinds but packets."""
        self.link = link
        packet = max((e.max_message_size for e in self.exchanges.values()), default=0)
        link.listen(self.peers, {Kind.PACKET: packet, **limits})

    @property
    def _most_unused(self) -> int:
        """The most bytes of a message with the tensors that have no gradient."""
        return max(unused_size(len(part.names)) for part in self.parts.values())

    def _note_non_finite(self, number: int, version: int) -> None:
        """Called when a version of a part is known to be finite or not."""
        where = self.exchanges[number].non_finite
        if where is not None and self.non_finite is None:
            self.non_finite = version, where

    @property
    def outgrown_residuals(self) -> list[dict[str, Any]]:
        return [
            found for exchange in self.exchanges.values() for found in exchange.outgrown_residuals
        ]

    def residuals(self) -> Iterable[checkpoint.Residual]:
        for exchange in self.exchanges.values():
            yield from checkpoint.residuals_in(exchange)

    def load_residuals(self, residuals: Iterable[checkpoint.Residual]) -> None:
        """Takes over residuals of the tensors that this rank exchanges. A worker owes the whole of
        what all workers owe together, because all of them push."""
        number_of = {name: n for n, part in self.parts.items() for name in self._names(part)}
        for residual in residuals:
            if residual.name in number_of:
                kind = "push" if residual.kind == "owed" else residual.kind
                self.exchanges[number_of[residual.name]].import_residual(kind, *residual[1:])

    @abstractmethod
    def _names(self, part: ServerPart) -> Iterable[str]:
        """The part's tensors for which this rank keeps residuals."""

    @abstractmethod
    def named_model(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has of the model here: on a server its tensors, on a worker the sums of
        the changes. Empty with pulls="gradients"."""

    def counters(self) -> dict[str, Any]:
        """The exchanges' counters, as sums over the parts; `steps`: those of this rank."""
        counted = [exchange.stats() for exchange in self.exchanges.values()]
        sums: Counter[str] = Counter()
        for counters in counted:
            sums.update(counters)
        return sums | {"steps": max(counters["steps"] for counters in counted)}

    def dropped_pushes(self) -> dict[int, int]:
        """By rank; see the exchanges."""
        sums: Counter[int] = Counter()
        for exchange in self.exchanges.values():
            sums.update(dict(enumerate(exchange.dropped_pushes)))
        return dict(sums)
