"""What workers and servers have alike: the parts of the model, and handlers of messages."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch.optim import Optimizer

from gradwire.errors import warn_user
from gradwire.torch import checkpoint
from gradwire.torch.errors import NonFiniteStepWarning, OutgrownResidualWarning, PeerMismatchError
from gradwire.torch.network.transport import Bytes, Kind
from gradwire.torch.server.group_options import unused_size
from gradwire.torch.server.model_parts import ServerPart, WorkerPart
from gradwire.torch.server.server_link import Message, ServerLink
from gradwire.torch.server.server_plan import ServerPlan
from gradwire.torch.stats import OutgrownResidual

P = TypeVar("P", ServerPart, WorkerPart)
Handlers = dict[Kind, tuple[int, Callable[[Message], None]]]  # with the most bytes of a message
Outgoing = Iterable[tuple[int, Kind, Bytes, int]]  # peer, kind, payload, number of the part


class Side(Generic[P]):
    """One rank. The methods of its subclasses are called inside `ServerLink.guard`.

    Attributes:
        parts: By the number that all ranks give to a part.
        peers: The ranks of the other side.
        lost: Workers that are gone without having left; known to servers, like the next two.
        joined: Places that other processes have taken, in this order.
        models: How often a worker was sent the model, as it lacked versions no longer kept.
    """

    role: ClassVar[str]
    # The counters of pushes and pulls: bytes of both, values of both.
    moved: ClassVar[tuple[str, str, str, str]]
    link: ServerLink

    def __init__(
        self, plan: ServerPlan, rank: int, optimizer: Optimizer, peers: range, parts: Iterable[P]
    ) -> None:
        self.parts: dict[int, P] = {part.number: part for part in parts}
        self.rank, self.peers, self.settings = rank, peers, plan.settings
        self.lost: set[int] = set()
        self.joined: list[int] = []
        self.models = 0
        self._optimizer, self._buffers = optimizer, plan.buffers
        self._handlers: Handlers = {}
        # The counters at the ends of the last two steps or versions.
        self.counted: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        # The first version that was not finite, and where.
        self._non_finite: tuple[int, dict[str, Any]] | None = None
        self._warned_of_non_finite = False
        self._warned_of_outgrown = 0

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the part and server that are furthest behind."""

    @property
    @abstractmethod
    def has_state(self) -> bool:
        """Whether it goes on from a saved state, with which it does not need the model."""

    def state_text(self) -> bytes:
        """Equal on all ranks if each has loaded the state that it saved at the same version, so
        that they can go on exactly; b"" if this one has not."""
        depends = self.settings.depends_on_speed or self.settings.goes_on
        return f"version {self.version}".encode() if self.has_state and not depends else b""

    @abstractmethod
    def load_state(self, state: checkpoint.StateDict, of_optimizer: checkpoint.StateDict) -> None:
        """Takes over saved states, before `begin`. Raises ValueError, before anything is changed,
        if that lacks tensors of this rank.

        Args:
            state: What gradwire keeps.
            of_optimizer: The wrapped optimizer's, of `own_names`.
        """

    @abstractmethod
    def begin(self, link: ServerLink) -> None:
        """Gives the workers the servers' model, over this link, or its version alone where all
        ranks go on from their states."""

    def _listen(self, link: ServerLink, handlers: Handlers) -> None:
        """Takes these kinds of messages of the peers over this link."""
        self.link, self._handlers = link, handlers
        link.listen(self.peers, {kind: most for kind, (most, _) in handlers.items()})

    def _handle(self, message: Message) -> None:
        if message.kind not in self._handlers:
            self._refuse(message)
        self._handlers[message.kind][1](message)

    def _part_of(self, message: Message) -> P:
        if message.part not in self.parts:
            self._refuse(message)
        return self.parts[message.part]

    def _refuse(self, message: Message) -> NoReturn:
        """The message is not for this side, or not now."""
        raise PeerMismatchError(
            f"rank {message.peer} sent a message ({message.kind.label}) for which rank {self.rank} "
            "has no use now",
            (message.peer,),
        )

    def _send_packets(self, part: P) -> None:
        outgoing = part.exchange.outgoing()
        self._send((peer, Kind.PACKET, message, part.number) for peer, message in outgoing)

    def _send(self, messages: Outgoing) -> None:
        for peer, kind, payload, part in messages:
            self.link.send(peer, kind, payload, part)

    @property
    def _most_packet(self) -> int:
        """The most bytes of a packet."""
        return max((part.exchange.max_message_size for part in self.parts.values()), default=0)

    @property
    def _most_unused(self) -> int:
        """The most bytes of a message with the tensors that have no gradient."""
        return max(unused_size(len(part.names)) for part in self.parts.values())

    def _note_non_finite(self, part: P, version: int) -> None:
        """Called when a version of a part is known to be finite or not."""
        where = part.exchange.non_finite
        if where is not None and self._non_finite is None:
            self._non_finite = version, where

    def warn(self) -> None:
        """Warns of what has gone wrong since it was called last."""
        outgrown = self.outgrown_residuals()
        for residual in outgrown[self._warned_of_outgrown :]:
            warn_user(residual.describe(), OutgrownResidualWarning)
        self._warned_of_outgrown = len(outgrown)
        if self._non_finite is not None and not self._warned_of_non_finite:
            self._warned_of_non_finite = True
            version, where = self._non_finite
            skipped = (
                "this version of the tensor" if self.settings.is_tensorwise else "this version"
            )
            warn_user(
                f"version {version}: the gradient of rank {where['rank']} is not finite at element "
                f"{where['element']} of {where['tensor']}; nobody applied {skipped}, and the "
                "residuals are kept. Further ones are only counted (skipped_versions)",
                NonFiniteStepWarning,
            )

    def outgrown_residuals(self) -> list[OutgrownResidual]:
        """The residuals that were found too large."""
        found = [each for p in self.parts.values() for each in p.exchange.outgrown_residuals]
        return [OutgrownResidual(**residual) for residual in found]

    @property
    def own_names(self) -> set[str]:
        """The tensors for which this rank keeps residuals; on a server those that it has."""
        return {name for part in self.parts.values() for name in part.own_names}

    def residuals(self) -> Iterable[checkpoint.Residual]:
        for part in self.parts.values():
            yield from checkpoint.residuals_in(part.exchange)

    def _load_residuals(self, residuals: Iterable[checkpoint.Residual]) -> None:
        """Takes over residuals of the tensors that this rank exchanges. A worker owes the whole of
        what all workers owe together, because all of them push."""
        part_of = {name: part for part in self.parts.values() for name in part.own_names}
        for residual in residuals:
            if residual.name in part_of:
                kind = "push" if residual.kind == "owed" else residual.kind
                part_of[residual.name].exchange.import_residual(kind, *residual[1:])

    def named_model(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has of the model here: on a server its tensors, on a worker the sums of
        the changes. Empty with pulls="gradients"."""
        return {n: t for part in self.parts.values() for n, t in part.named_model().items()}

    def count(self) -> None:
        """Called at the end of a step or a version."""
        self.counted = self.counted[1], self.counters() | {"wire_seconds": self.link.wire_seconds}

    def counters(self) -> dict[str, Any]:
        """The exchanges' counters, as sums over the parts; `steps`: those of this rank."""
        counted = [part.exchange.stats() for part in self.parts.values()]
        sums: Counter[str] = Counter()
        for counters in counted:
            sums.update(counters)
        return sums | {"steps": max(counters["steps"] for counters in counted)}

    def dropped_pushes(self) -> dict[int, int]:
        """By rank; see the exchanges."""
        sums: Counter[int] = Counter()
        for part in self.parts.values():
            sums.update(dict(enumerate(part.exchange.dropped_pushes)))
        return dict(sums)
