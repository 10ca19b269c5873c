"""What LocalSteps reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradwire.torch.optimizers.averaging import Averaging, Peers, ratio_in_steps
from gradwire.torch.optimizers.replica import BESIDE
from gradwire.torch.stats import Stats, times_less


@dataclass(frozen=True)
class LocalStats:
    """`exchanges`: bytes and times, which count each exchange of a fragment as a step.

    ratio   bytes of an uncompressed exchange of the model in each of this rank's steps / bytes
            sent. (exchanges.ratio compares with the same exchanges, uncompressed.) None: none sent
    """

    every: int
    fragments: tuple[int, ...]  # the values of each
    local_steps: int  # of the training, as LocalSteps.local_steps
    left_out: int  # local steps that a GradScaler left out on this rank
    gains: tuple[float, ...]  # of the parameters, by which changes are multiplied; empty: by 1
    exchanges: Stats
    ratio: float | None
    # Of on_lost="continue":
    generation: int = 0  # how often the members have changed
    members: tuple[int, ...] = ()  # now, by their numbers
    lost_members: tuple[int, ...] = ()  # as far as this rank was there

    def as_dict(self) -> dict[str, Any]:
        own = {n: list(v) if isinstance(v, tuple) else v for n, v in vars(self).items()}
        del own["exchanges"]
        of_exchanges = self.exchanges.as_dict()
        return of_exchanges | {"ratio_of_exchanges": self.exchanges.ratio} | own

    def report(self) -> str:
        """Notes and a table as text, which counts each exchange as a step."""
        left_out = f", {self.left_out} left out by a GradScaler" if self.left_out else ""
        steps = f"{self.local_steps} steps{left_out}, an exchange every {self.every}"
        rows = []
        if len(self.fragments) > 1:
            steps += f" of each of {len(self.fragments)} fragments"
            least, most = min(self.fragments), max(self.fragments)
            rows.append(("fragments", f"of {least:,} to {most:,} values"))
        if self.gains:
            least_gain, most_gain = min(self.gains), max(self.gains)
            noise = f"{least_gain:.2f} to {most_gain:.2f} for the gradient's noise"
            rows.append(("gains", noise))
        if self.members:
            who = "member" if len(self.lost_members) == 1 else "members"
            lost = f", lost {who} {_list(self.lost_members)}" if self.lost_members else ""
            now = f"{_list(self.members)} in generation {self.generation}{lost}"
            rows.append(("members", now))
        ratio = times_less(self.ratio)
        if self.every > 1 and self.ratio is not None:
            ratio += f" in each step; an exchange {times_less(self.exchanges.ratio)}"
        return self.exchanges.report([("local", steps), *rows], ratio)

    __str__ = report


def summarize(averaging: Averaging, peers: Peers, own_steps: int, left_out: int) -> LocalStats:
    """own_steps: of this object, whose bytes are counted."""
    exchanges = peers.session.stats()
    raw = tuple(tensor for tensor in exchanges.raw_tensors if tensor.name != BESIDE)
    tensors = tuple(tensor for tensor in exchanges.tensors if tensor.name != BESIDE)
    shelves = [fragment.shelf for fragment in averaging.fragments if fragment.shelf is not None]
    remarks = exchanges.remarks
    if shelves:
        copied = sum(shelf.copied_bytes for shelf in shelves)
        remarks += (f"anchors are on the host, and {copied:,} bytes of them were copied",)
    exchanges = replace(exchanges, raw_tensors=raw, tensors=tensors, remarks=remarks)
    return LocalStats(
        averaging.rules.schedule.every,
        tuple(fragment.numel for fragment in averaging.fragments),
        averaging.steps,
        left_out,
        tuple(averaging.gains()),
        exchanges,
        ratio_in_steps(exchanges.ratio, averaging, own_steps, exchanges.values),
        **peers.counted(),
    )


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
