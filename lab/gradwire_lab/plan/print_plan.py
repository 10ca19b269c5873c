"""A plan as a table for people."""

from __future__ import annotations

from gradwire.cli.output import human_bytes, print_table, say
from gradwire_lab.plan.advise import Plan, describe_exchange, show_time
from gradwire_lab.plan.cluster import Cluster, count_servers
from gradwire_lab.plan.profile import Profile


def _origin(profile: Profile) -> str:
    """What was assumed, or how many processes computed at once, and on how many cores, which other
    work may have kept busy, if the profile says it."""
    if assumed := profile.how.get("assumed"):
        return f"assumed: {assumed}; codecs measured here on {profile.how.get('data')}"
    text = "profile: 1 process" if profile.workers == 1 else f"profile: {profile.workers} processes"
    text += " computed at once"
    if profile.cores is None:
        return text
    text += f" on {profile.cores} cores"
    if (load := profile.load_of_others) is not None:
        text += f", which other work kept busy (load average {load:.1f}): its times are too long"
    return text


def print_plan(profile: Profile, cluster: Cluster, made: Plan) -> None:
    beside = f" and {count_servers(cluster.servers)}" if cluster.servers else ""
    machines = "1 machine" if cluster.machines == 1 else f"{cluster.machines} machines"
    say(
        f"{profile.model}, {profile.numel:,} values, {cluster.ranks} ranks on {machines}{beside}; "
        f"a step computes {show_time(profile.compute_seconds)}\n"
        f"{_origin(profile)}"
    )
    print_table(
        (
            *("codec", "exchange", "step ms", "of DDP", "codec ms", "network ms", "messages ms"),
            *("waiting ms", "bits/value", "sent to all ranks"),
        ),
        [
            (
                prediction.codec,
                describe_exchange(prediction.exchange, prediction.every),
                f"{prediction.seconds * 1e3:.1f}",
                f"{prediction.seconds / made.baseline.seconds:.2f}",
                f"{prediction.codec_seconds * 1e3:.2f}",
                f"{prediction.wire_seconds * 1e3:.1f}",
                f"{prediction.message_seconds * 1e3:.2f}",
                f"{prediction.exposed_seconds * 1e3:.1f}",
                f"{prediction.bits:.2f}",
                human_bytes(round(prediction.sent_bytes)),
            )
            for prediction in made.predictions
        ],
        left=range(2),
        keys=2,
    )
    say(made.advice())
