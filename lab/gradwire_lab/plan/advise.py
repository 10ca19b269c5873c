"""All predictions for a model and a network, and which of them to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire._core import spell_out_codec
from gradwire.errors import RECOMMENDED, sends_late
from gradwire.local_schedule import Schedule
from gradwire_lab.plan.cluster import Cluster, count_servers
from gradwire_lab.plan.costs import EXCHANGES
from gradwire_lab.plan.predict import DDP, Prediction, cut_buckets, predict
from gradwire_lab.plan.profile import PlanError, Profile
from gradwire_lab.train.settings import HOOKED, SERVED, SERVER, SHARDED, shares_scales

# Predictions that are closer than this count as equal: most steps that are not very short were
# measured as close to their prediction (docs/results/planning.md).
MARGIN = 0.1

# Measured for a profile unless other codecs are asked for: from the gentlest to the coarsest.
CODECS = ("raw", "bf16", "int8", "qsgd:bits=4", RECOMMENDED)

# Exchanges of codecs with shared scales alone.
_TRITS = tuple(name for name, info in HOOKED.items() if info["adds_trits"])

# Hops of a ring quantize growing sums; these codecs lose accuracy (docs/results/exchanges.md).
_NOT_IN_RINGS = ("3lc", "topk", "topk2bit", "stc", "qgd", "onebit")


@dataclass(frozen=True)
class Plan:
    """predictions: the fastest first; DDP without gradwire is among them. choice: the prediction to
    take; `ddp` where compression does not pay."""

    predictions: tuple[Prediction, ...]
    choice: Prediction
    baseline: Prediction  # DDP without gradwire
    compute_seconds: float  # of a step that exchanges nothing
    servers: int = 0
    doubts: tuple[str, ...] = ()  # why the choice may be wrong

    @property
    def pays(self) -> bool:
        return self.choice is not self.baseline

    def advice(self) -> str:
        """A sentence for the user, and another one if it is in doubt."""
        return ". In doubt: ".join([self._advice(), *self.doubts])

    def _advice(self) -> str:
        before, chosen = self.baseline, self.choice
        if not self.pays:
            fastest = self.predictions[0]
            others = (
                "no codec is faster"
                if fastest is before
                else f"the fastest, {fastest.codec} in {self._way(fastest)}, takes "
                f"{show_time(fastest.seconds)}, and a gain below {MARGIN:.0%} is within the error "
                "of the prediction"
            )
            return (
                f"do not compress: a step of DDP takes {show_time(before.seconds)}, of which "
                f"{show_time(before.exposed_seconds)} wait for the network; {others}"
            )
        differs = "; local steps train in another way than DDP, so look at the accuracy, too"
        return (
            f"take codec {chosen.codec} with exchange {self._way(chosen)}: "
            f"{show_time(chosen.seconds)} a step instead of {show_time(before.seconds)} with DDP "
            f"({before.seconds / chosen.seconds:.2f} times as fast; "
            f"{show_time(self.compute_seconds)} without any exchange){differs * (chosen.every > 1)}"
        )

    def _way(self, prediction: Prediction) -> str:
        if prediction.exchange in SERVED:
            return f"{prediction.exchange} and {count_servers(self.servers)}"
        return describe_exchange(prediction.exchange, prediction.every)


def describe_exchange(exchange: str, every: int) -> str:
    """`sharded`, or `sharded every 8 steps`."""
    return exchange if every == 1 else f"{exchange} every {every} steps"


def make_plan(
    profile: Profile,
    cluster: Cluster,
    codecs: Sequence[str] = (),
    exchanges: Sequence[str] = (),
    bucket_bytes: int | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """codecs: of the profile; none: all of them, apart from those that hold much back where
    exchanges are seldom. exchanges: none: all that suit the codec and the
    network; `server` does if the network has servers. schedule: of LocalSteps, which all
    predictions but DDP's then take.

    Of the predictions within MARGIN of the fastest, the choice has the most bits a value, because
    it loses least; DDP loses nothing. Raises PlanError.
    """
    check_servers(cluster.servers, exchanges, schedule.every if schedule else 1)
    check_exchanges(codecs, exchanges)
    layers = len(profile.layers)
    if cluster.servers > layers:
        raise PlanError(
            f"--servers {cluster.servers}: a tensor lies whole on one server, and "
            f"{profile.model} has {layers}: take {layers} or fewer"
        )
    buckets = cut_buckets(profile, bucket_bytes)
    baseline = predict(profile, cluster, DDP, DDP, buckets)
    predictions = [baseline]
    seldom = schedule is not None and schedule.is_seldom
    for codec in codecs or [c for c in profile.codecs if not (seldom and sends_late(c))]:
        for exchange in exchanges or (*EXCHANGES, SERVER):
            if _takes(exchange, codec) and (exchanges or _suits(codec, exchange, cluster)):
                predictions.append(predict(profile, cluster, codec, exchange, buckets, schedule))
    if len(predictions) == 1:
        needed = next((HOOKED[e]["default_codec"] for e in exchanges if e in _TRITS), "NAME")
        raise PlanError(
            f"the profile of {profile.model} has no codec to predict, but "
            f"{', '.join(profile.codecs) or 'none'}; {profile.advise_codec(needed)}"
        )
    predictions.sort(key=lambda p: p.seconds)
    close = [p for p in predictions if p.seconds <= predictions[0].seconds * (1 + MARGIN)]
    gentlest = max(close, key=lambda p: (p is baseline, p.bits, -p.seconds))
    doubts = tuple(_doubts(profile, pays=gentlest is not baseline))
    return Plan(
        tuple(predictions),
        gentlest,
        baseline,
        profile.compute_seconds,
        cluster.servers,
        doubts,
    )


def _doubts(profile: Profile, *, pays: bool) -> Iterator[str]:
    """What the profile leaves out that would change the choice."""
    if pays and profile.transport.message_seconds == 0:
        yield (
            "in the profile gradwire's messages cost nothing (`message_seconds` is 0), which makes "
            f"its steps too short; {profile.remedy}"
        )
    if not pays and profile.transport.message_seconds > 0 == profile.transport.allreduce_seconds:
        yield (
            "in the profile DDP's messages cost nothing (`allreduce_seconds` is 0), which makes "
            f"its step too short; {profile.remedy}"
        )
    if (load := profile.load_of_others) is not None:
        yield (
            f"other work kept the machine busy when the profile was measured (load average "
            f"{load:.1f}); measure it again when the machine is idle"
        )


def check_exchanges(codecs: Sequence[str], exchanges: Sequence[str]) -> None:
    """Raises PlanError for an exchange that gradwire does not have, or not with such a codec."""
    for exchange in exchanges:
        if exchange not in (*HOOKED, *SERVED):
            raise PlanError(
                f"--exchange {exchange}: valid are {', '.join((*EXCHANGES, *SERVED))} and, with "
                + ", ".join(f"the codec {HOOKED[e]['default_codec']}, {e}" for e in _TRITS)
            )
        for codec in codecs:
            if not _takes(exchange, codec):
                own = HOOKED[exchange]["default_codec"]
                raise PlanError(
                    f"--exchange {exchange} takes the codec {own}, not {codec}: give --codec "
                    f"{own}, or --exchange {SHARDED}"
                )


def check_servers(servers: int, exchanges: Sequence[str], every: int = 1) -> None:
    """exchanges: none: those that suit. Raises PlanError if servers do not go with the rest."""
    served = [exchange for exchange in exchanges if exchange.partition(":")[0] == SERVER]
    for exchange in served:
        if exchange not in SERVED:
            raise PlanError(
                f"--exchange {exchange}: valid are {', '.join(SERVED)}. All workers push in each "
                "step and wait for the pulls: backup workers, staleness and --barrier tensor are "
                "not modelled"
            )
    if (served or servers > 0) and every > 1:
        raise PlanError(
            f"--every {every}: with --exchange {SERVER} workers exchange in every step; local "
            "steps go with the other exchanges"
        )
    if served and servers == 0:
        raise PlanError(
            f"--exchange {served[0]} needs the number of servers: --servers 1, or more. They are "
            "processes beside the --ranks workers"
        )
    if servers > 0 and exchanges and not served:
        raise PlanError(
            f"--servers {servers} goes with --exchange {SERVER}, not with {', '.join(exchanges)}"
        )


def _takes(exchange: str, codec: str) -> bool:
    return exchange not in _TRITS or shares_scales(codec)


def _suits(codec: str, exchange: str, cluster: Cluster) -> bool:
    """Whether a user who knows the exchanges would take it with this codec on this network."""
    if exchange == SERVER:
        return cluster.servers > 0
    if HOOKED[exchange]["between_machines"]:
        return cluster.ranks_per_machine > 1 and cluster.machines > 1
    if HOOKED[exchange]["encodes_sums_on_the_way"]:
        return spell_out_codec(codec).partition(":")[0] not in _NOT_IN_RINGS
    return True


def show_time(seconds: float) -> str:
    """`12.3 ms`, `1.23 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
