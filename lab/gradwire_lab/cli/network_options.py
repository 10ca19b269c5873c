"""The options of a network, which `plan` and `simulate` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.profile import PlanError
from gradwire_lab.train.settings import SettingsError, parse_bandwidth

_BANDWIDTH_HELP = (
    "Rate of every machine's link, each way, such as 100mbit or 10gbit; none: no limit. Needed."
)
_LATENCY_HELP = "Milliseconds that a message takes from a machine to another."
_PER_MACHINE_HELP = "Consecutive ranks that share a machine and its link."
_LOCAL_HELP = "Rate of a rank inside its machine, each way; none: no limit."
_BURST_HELP = (
    "Bytes that a link passes at once, each way, after it was idle: the size of its token bucket, "
    "as `tc tbf` and cloud providers have it."
)
_SERVERS_HELP = (
    "With --exchange server: processes that hold the model, beside the --ranks workers, each on a "
    "machine of its own."
)
_EVERY_HELP = (
    "Local steps: steps from one exchange of the whole model to the next, as in `gradwire train`."
)
# As many as `gradwire train` takes.
ServersOption = Annotated[int | None, Option(min=1, max=100, help=_SERVERS_HELP)]
EveryOption = Annotated[int, Option(min=1, help=_EVERY_HELP)]


@dataclass(frozen=True)
class NetworkOptions:
    """Each field is an option of the commands."""

    bandwidth: Annotated[str | None, Option(help=_BANDWIDTH_HELP)] = None
    latency: Annotated[float, Option(help=_LATENCY_HELP)] = 0.0
    ranks_per_machine: Annotated[int, Option(help=_PER_MACHINE_HELP)] = 1
    local_bandwidth: Annotated[str, Option(help=_LOCAL_HELP)] = "none"
    burst: Annotated[int, Option(metavar="BYTES", help=_BURST_HELP)] = 0

    def cluster(self, ranks: int, servers: int | None) -> Cluster:
        """Raises PlanError and SettingsError, which say what is valid."""
        if self.bandwidth is None:
            raise PlanError(
                "the bandwidth of the network is needed: --bandwidth 100mbit, or none for no limit"
            )
        rate = parse_bandwidth(self.bandwidth)
        try:
            local_rate = parse_bandwidth(self.local_bandwidth)
        except SettingsError as error:  # it names --bandwidth
            raise SettingsError("--local-bandwidth", error.message) from error
        return Cluster(
            ranks=ranks,
            bandwidth=rate,
            latency=self.latency / 1e3,
            ranks_per_machine=self.ranks_per_machine,
            local_bandwidth=local_rate,
            servers=servers or 0,
            burst=self.burst,
        )
