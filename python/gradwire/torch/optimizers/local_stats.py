"""What LocalSteps reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.torch.records.stats import Stats


@dataclass(frozen=True)
class LocalStats:
    """`exchanges`: bytes and times, which count each exchange of a fragment as a step."""

    every: int
    fragments: tuple[int, ...]  # the values of each
    local_steps: int  # of this rank's own optimizer
    left_out: int  # local steps that a GradScaler left out on this rank
    gains: tuple[float, ...]  # of the parameters, by which changes are multiplied; empty: by 1
    exchanges: Stats
    # Of on_lost="continue":
    generation: int = 0  # how often the members have changed
    members: tuple[int, ...] = ()  # now, by their numbers
    lost_members: tuple[int, ...] = ()  # as far as this rank was there

    def as_dict(self) -> dict[str, Any]:
        own = {"every": self.every, "local_steps": self.local_steps, "left_out": self.left_out}
        lists = {"fragments": list(self.fragments), "gains": list(self.gains)}
        members = {"members": list(self.members), "lost_members": list(self.lost_members)}
        return {
            **self.exchanges.as_dict(),
            **own,
            **lists,
            **members,
            "generation": self.generation,
        }

    def report(self) -> str:
        """A table as text, which counts each exchange as a step."""
        left_out = f", {self.left_out} left out by a GradScaler" if self.left_out else ""
        lines = [f"local      {self.local_steps} steps{left_out}, an exchange every {self.every}"]
        if len(self.fragments) > 1:
            lines[0] += f" of each of {len(self.fragments)} fragments"
            least, most = min(self.fragments), max(self.fragments)
            lines.append(f"fragments  of {least:,} to {most:,} values")
        if self.gains:
            least_gain, *_, most_gain = sorted([*self.gains, *self.gains])
            lines.append(f"gains      {least_gain:.2f} to {most_gain:.2f} for the gradient's noise")
        if self.members:
            lost = f", lost {_list(self.lost_members)}" if self.lost_members else ""
            lines.append(f"members    {_list(self.members)} in generation {self.generation}{lost}")
        return "\n".join([*lines, self.exchanges.report()])

    __str__ = report


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
