"""The proof, over new connections, that their other ends have the job key."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.job_key import TAG_BYTES, JobKey
from gradwire.torch.errors import JobKeyError

TAG = 0x70726F66  # of the messages, before any other message of the group


def prove(group: dist.ProcessGroup, key: JobKey, ranks: Sequence[int], timeout: float) -> None:
    """Every rank of the group must call this.

    key    of these ranks and this meeting alone: it holds a random number of each rank, so the
           proof of another meeting is of no use, and a proof has sender and receiver
    ranks  as errors name them, by place

    Raises JobKeyError naming a rank whose place another process has, and RuntimeError where a
    connection breaks or nothing comes for `timeout` seconds.
    """
    own, places = group.rank(), [place for place in range(group.size()) if place != group.rank()]
    proofs = {place: torch.empty(TAG_BYTES, dtype=torch.uint8, device="cpu") for place in places}
    receives = {place: group.recv([proofs[place]], place, TAG) for place in places}
    sends = [group.send([proof_of(key, own, place)], place, TAG) for place in places]
    for place, receive in receives.items():
        receive.wait(timedelta(seconds=timeout))
        if not key.made(proofs[place].numpy().tobytes(), *_words(place, own)):
            raise JobKeyError(
                f"rank {ranks[own]}: the process that connected as rank {ranks[place]} has not "
                "this job's key: it is not of this job",
                (ranks[place],),
            )
    for send in sends:
        send.wait(timedelta(seconds=timeout))


def proof_of(key: JobKey, sender: int, receiver: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(key.tag(*_words(sender, receiver))), dtype=torch.uint8)


def _words(sender: int, receiver: int) -> tuple[bytes, ...]:
    return b"proof", str(sender).encode(), str(receiver).encode()
