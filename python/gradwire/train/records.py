"""What a rank hands back of a run. Here and not in loop.py, so that reading it needs no PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.train.network import Bytes


@dataclass(frozen=True)
class Evaluation:
    """Share of the test images that rank 0 classified rightly after `step` steps and `seconds` of
    training."""

    step: int
    seconds: float
    accuracy: float


@dataclass
class RankRecord:
    """What one rank saw of one run. losses, push_bytes, pull_bytes: one element for each step, None
    where the others went on without this rank; empty on a server.

    seconds: of the training clock. push_bytes, pull_bytes: what the rank sent (a server's worker:
    what it pulled), empty for plain DDP, which does not tell. hook: the strategy's stats(), None
    for plain DDP. link: bytes that the rank's own interface counted while the clock ran, None where
    it has none of its own. parameters_digest: SHA-256 of all parameters after the last step.
    device: as devices.describe has it; empty on a server.
    """

    codec: str
    rank: int
    seconds: float = 0.0
    losses: list[float | None] = field(default_factory=list)
    push_bytes: list[int | None] = field(default_factory=list)
    pull_bytes: list[int | None] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    hook: dict[str, Any] | None = None
    link: Bytes | None = None
    parameters_digest: str = ""
    device: str = ""

    def note(self, loss: float, sent: tuple[int, int] | None, left_out: int) -> None:
        """A step that this rank took, and how many after it the others took without it."""
        self.losses += [loss] + [None] * left_out
        if sent is not None:
            self.push_bytes += [sent[0]] + [None] * left_out
            self.pull_bytes += [sent[1]] + [None] * left_out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> RankRecord:
        return RankRecord(
            **{
                **values,
                "evaluations": [Evaluation(**item) for item in values["evaluations"]],
                "link": None if values["link"] is None else Bytes(**values["link"]),
            }
        )
