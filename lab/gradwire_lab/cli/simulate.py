"""``gradwire simulate``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

import gradwire
from gradwire.cli.output import (
    JsonOption,
    check_codec,
    complete_codec,
    complete_exchange,
    human_bytes,
    print_json,
    print_table,
)
from gradwire.errors import RECOMMENDED
from gradwire_lab.bench_data import load_data
from gradwire_lab.cli.network_options import EveryOption, NetworkOptions, ServersOption
from gradwire_lab.cli.progress import ProgressOfSteps
from gradwire_lab.cli.quantities import parse_count
from gradwire_lab.cli.records import with_record
from gradwire_lab.plan.advise import check_servers
from gradwire_lab.plan.assumed import measure_speed
from gradwire_lab.plan.predict import LayerBucket, cut_buckets, join
from gradwire_lab.plan.profile import Layer, PlanError, Profile, read_profile
from gradwire_lab.plan.simulate import Simulated, check_ranks
from gradwire_lab.plan.simulate import simulate as run
from gradwire_lab.train.settings import SERVED

_MEASURED, _NONE = "measured", "none"
_BENCH_VALUES = 200_000
_BENCH_SECONDS = 0.1

_RANKS_HELP = "Numbers of ranks, such as 2,4,8; with --servers, of workers."
_VALUES_HELP = "Values of the model, such as 270k or 25.6M; all gradients are ready at once."
_PROFILE_HELP = "The model instead: a profile of `gradwire plan`, with its backward pass."
_CODEC_TIME_HELP = "measured (in the profile, or else here and now) or none."
_DATA_HELP = "Gradients, as `gradwire bench` takes them: recorded, synthetic, a file, or auto."
_MEMORY_HELP = "Memory that it may take, such as 8G. Default: what the system has free."


@with_record("network", NetworkOptions)
def simulate(
    ranks: Annotated[str, Option(help=_RANKS_HELP)] = "2,4,8,16",
    codec: Annotated[
        str, Option("--codec", "-c", help="Codec.", autocompletion=complete_codec)
    ] = RECOMMENDED,
    exchange: Annotated[
        str,
        Option(help="Exchange, with its parameters, or server.", autocompletion=complete_exchange),
    ] = "sharded",
    values: Annotated[str | None, Option(help=_VALUES_HELP)] = None,
    profile: Annotated[Path | None, Option(metavar="FILE", help=_PROFILE_HELP)] = None,
    *,
    network: NetworkOptions,
    servers: ServersOption = None,
    every: EveryOption = 1,
    codec_time: Annotated[str, Option(metavar=f"{_MEASURED}|{_NONE}", help=_CODEC_TIME_HELP)] = (
        _MEASURED
    ),
    steps: Annotated[int, Option(min=1, help="Steps; residuals grow from step to step.")] = 3,
    data: Annotated[str, Option(help=_DATA_HELP)] = "auto",
    memory: Annotated[str | None, Option(help=_MEMORY_HELP)] = None,
    seed: Annotated[int, Option(min=0, max=2**64 - 1, help="Seed of draws and data.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the exchanges of up to 1024 ranks in this process, on a simulated network.

    The bytes are exact: they are those that the same gradients take in a training. The times follow
    from the bandwidth, the latency and the codecs' speed. With --every, bytes and messages are
    those of an exchange, and `step ms` is the mean of --every steps.
    """
    check_codec(codec)
    if values is None and profile is None:
        raise PlanError("a simulation needs the size of a model: --values 1M, or --profile FILE")
    if values is not None and profile is not None:
        raise PlanError(
            f"give one of --values and --profile: {profile} says how many values the model has"
        )
    if codec_time not in (_MEASURED, _NONE):
        raise BadParameter(
            f"{codec_time} is not valid; valid are {_MEASURED}, {_NONE}", param_hint="--codec-time"
        )
    check_servers(servers or 0, [exchange], every)
    if exchange not in SERVED:
        _check_exchange(exchange)
    model = _model_of(values) if profile is None else read_profile(profile)
    buckets = cut_buckets(model)
    if every > 1 or exchange in SERVED:
        buckets = [join(buckets)]
    limit = None if memory is None else parse_count(memory, "--memory")
    clusters = [network.cluster(count, servers) for count in _parse_ranks(ranks)]
    for cluster in clusters:
        check_ranks(cluster, codec, exchange, buckets, limit)
    gradients = load_data(data, seed)
    speed = _speed_of(model, codec_time)
    rows = []
    with ProgressOfSteps(len(clusters) * steps, is_shown=not as_json) as progress:
        for cluster in clusters:
            progress.begin(f"{cluster.ranks} ranks")
            simulated = run(
                cluster,
                codec,
                exchange,
                buckets,
                gradients.period,
                cost=speed,
                message_seconds=model.transport.message_seconds,
                pause=_pause(model, every),
                steps=steps,
                memory=limit,
                seed=seed,
                on_step=progress.end_step,
            )
            rows.append(simulated)
    whole = [_step_seconds(model, row, buckets, every) for row in rows]
    if as_json:
        document = {
            "kind": "gradwire-simulation",
            "codec": codec,
            "exchange": exchange,
            "every": every,
            "values": sum(bucket.numel for bucket in buckets),
            "cluster": asdict(clusters[0]) | {"ranks": None},
            "data": gradients.description,
            "results": [
                asdict(row) | {"step_seconds": seconds}
                for row, seconds in zip(rows, whole, strict=True)
            ],
        }
        print_json(document)
    else:
        _print(rows, whole, every)


def _model_of(values: str | None) -> Profile:
    """One tensor of so many values, which takes no time."""
    count = parse_count(values or "", "--values")
    return Profile("values", 1, 0.0, 0.0, (Layer("values", (count, 1), 0.0),), codecs={})


def _check_exchange(text: str) -> None:
    try:
        gradwire.parse_exchange(text)
    except gradwire.GradwireError as error:
        raise BadParameter(f"{error}; or {', '.join(SERVED)}", param_hint="--exchange") from None


def _parse_ranks(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise BadParameter(f"{text} is no list of numbers, such as 2,4,8", param_hint="--ranks")
    return [int(count) for count in text.split(",")]


def _speed_of(model: Profile, codec_time: str) -> Callable[[str], tuple[float, float]] | None:
    """Seconds a value of encode and decode: of the profile, else measured here."""
    if codec_time == _NONE:
        return None

    def speed(codec: str) -> tuple[float, float]:
        known = model.codecs.get(codec)
        if known is None:
            known = measure_speed(codec, _BENCH_VALUES, _BENCH_SECONDS, load_data("auto", 0))
        return known.encode_seconds, known.decode_seconds

    return speed


def _pause(model: Profile, every: int) -> float:
    """From the end of an exchange to the step whose gradients are exchanged next."""
    return model.rest_seconds + (every - 1) * model.compute_seconds


def _step_seconds(model: Profile, row: Simulated, buckets: list[LayerBucket], every: int) -> float:
    """The mean of `every` steps, one of which exchanges."""
    if every > 1:
        return model.compute_seconds + (row.seconds - buckets[-1].ready) / every
    backward_end = model.forward_seconds + model.backward_seconds
    return max(row.seconds, backward_end) + model.rest_seconds


def _print(rows: list[Simulated], whole: list[float], every: int) -> None:
    print_table(
        (
            *("ranks", "step ms", "codec ms", "longest way", "messages", "to other machines"),
            *("from other machines", "in its machine", "of all ranks"),
        ),
        [
            (
                row.ranks,
                f"{seconds * 1e3:.3f}",
                f"{row.codec_seconds * 1e3:.3f}",
                row.longest_way,
                f"{row.messages:,}",
                human_bytes(round(row.bytes_sent)),
                human_bytes(round(row.bytes_received)),
                human_bytes(round(row.local_bytes_sent)),
                human_bytes(round(row.bytes_of_all)),
            )
            for row, seconds in zip(rows, whole, strict=True)
        ],
        left=(),
    )
    of = "a step" if every == 1 else f"of an exchange, every {every} steps"
    print(
        f"Bytes {of}: of the rank that sends most to other machines, receives most from them, and "
        "sends most in its machine; of all ranks: sent between machines."
    )
