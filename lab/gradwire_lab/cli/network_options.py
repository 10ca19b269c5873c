"""The options of a network, which `plan` and `simulate` share."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.profile import PlanError
from gradwire_lab.train.settings import SettingsError, parse_bandwidth

BandwidthOption = Annotated[
    str | None,
    Option(
        help="Rate of every machine's link, each way, such as 100mbit or 10gbit; none: no limit. "
        "Needed.",
    ),
]
LatencyOption = Annotated[
    float, Option(help="Milliseconds that a message takes from a machine to another.")
]
PerMachineOption = Annotated[
    int, Option(help="Consecutive ranks that share a machine and its link.")
]
LocalBandwidthOption = Annotated[
    str, Option(help="Rate of a rank inside its machine, each way; none: no limit.")
]
BurstOption = Annotated[
    int,
    Option(
        metavar="BYTES",
        help="Bytes that a link passes at once, each way, after it was idle: the size of its token "
        "bucket, as `tc tbf` and cloud providers have it.",
    ),
]
# As many as `gradwire train` takes.
ServersOption = Annotated[
    int | None,
    Option(
        min=1,
        max=100,
        help="With --exchange server: processes that hold the model, beside the --ranks workers, "
        "each on a machine of its own.",
    ),
]
EveryOption = Annotated[
    int,
    Option(
        min=1,
        help="Local steps: steps from one exchange of the whole model to the next, as in "
        "`gradwire train`.",
    ),
]


def cluster_of(
    ranks: int,
    bandwidth: str | None,
    latency: float,
    per_machine: int,
    local_bandwidth: str,
    servers: int | None,
    burst: int,
) -> Cluster:
    """Raises PlanError and SettingsError, which say what is valid."""
    if bandwidth is None:
        raise PlanError(
            "the bandwidth of the network is needed: --bandwidth 100mbit, or none for no limit"
        )
    return Cluster(
        ranks=ranks,
        bandwidth=parse_bandwidth(bandwidth),
        latency=latency / 1e3,
        ranks_per_machine=per_machine,
        local_bandwidth=_local(local_bandwidth),
        servers=servers or 0,
        burst=burst,
    )


def _local(text: str) -> int | None:
    """Bits a second. The error of parse_bandwidth names --bandwidth."""
    try:
        return parse_bandwidth(text)
    except SettingsError as error:
        raise SettingsError("--local-bandwidth", error.message) from error
