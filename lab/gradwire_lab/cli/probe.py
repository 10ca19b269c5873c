"""``gradwire probe``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from typer import Option

from gradwire.cli.output import JsonOption, print_json, say

_MACHINE_HELP = (
    "Consecutive ranks that share a machine and its link. Default: torchrun's number, or the ranks "
    "with the same host name."
)


def probe(
    ranks_per_machine: Annotated[int | None, Option(min=1, help=_MACHINE_HELP)] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the links between the ranks that torchrun has started.

    Start it on each machine of the training: torchrun ... -m gradwire probe. It measures bandwidth
    while all machines send at once, latency, and the burst that links pass at once, as `gradwire
    plan` takes them. Rank 0 prints them.
    """
    import torch.distributed as dist

    from gradwire_lab.plan import links
    from gradwire_lab.plan.profile import PlanError

    if not dist.is_torchelastic_launched():
        raise PlanError(
            "there are no ranks: start this on each machine with torchrun, "
            "torchrun ... -m gradwire probe"
        )
    dist.init_process_group("gloo")
    found = links.probe(ranks_per_machine)
    if dist.get_rank() == 0 and as_json:
        print_json({"kind": "gradwire-links", **asdict(found)})
    elif dist.get_rank() == 0:
        say(found.describe())
    dist.destroy_process_group()
