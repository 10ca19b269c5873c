"""``gradwire plan``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from gradwire.cli.output import (
    JsonOption,
    check_codec,
    complete_codec,
    complete_exchange,
    print_json,
    say,
    warn,
)
from gradwire.local_schedule import Schedule
from gradwire.machine import load_average
from gradwire_lab.cli.network_options import EveryOption, NetworkOptions, ServersOption
from gradwire_lab.cli.quantities import parse_count, parse_seconds
from gradwire_lab.cli.records import with_record
from gradwire_lab.plan.advise import (
    CODECS,
    Plan,
    check_exchanges,
    check_servers,
    make_plan,
)
from gradwire_lab.plan.assumed import assume_profile
from gradwire_lab.plan.cluster import Cluster, check_rank_count
from gradwire_lab.plan.print_plan import print_plan
from gradwire_lab.plan.profile import PlanError, Profile, is_busy, read_profile

_PROFILE_HELP = "The profile of a model: a file that --profile-out wrote."
_MODEL_HELP = "Measure a model of `gradwire train` here instead, with --workers processes."
_VALUES_HELP = (
    "The size of a model that is not here, such as 7B: with --compute in place of a profile. "
    "Codecs are measured here, and messages if PyTorch is installed."
)
_COMPUTE_HELP = "With --values: the time in which a step computes, such as 800ms."
_WORKERS_HELP = (
    "Processes that compute at once while the model is measured: as many as share a machine in the "
    "training that is planned. Default: --ranks."
)
_RANKS_HELP = "Processes that train together. Default: the workers of the profile."
_CODEC_HELP = (
    "Codec to predict (repeatable). Default: all of the profile; with --every above 4 without "
    "those that hold much back."
)
_EXCHANGE_HELP = (
    "Exchange to predict (repeatable). Default: those that suit the codec, and with --servers "
    "`server`."
)
_FRAGMENTS_HELP = "With --every: parts of the model, whose exchanges take turns within these steps."
_DELAY_HELP = "With --every: steps that an exchange may take while the next ones compute."


@with_record("network", NetworkOptions)
def plan(
    context: Context,
    profile: Annotated[Path | None, Option(metavar="FILE", help=_PROFILE_HELP)] = None,
    model: Annotated[str | None, Option(help=_MODEL_HELP)] = None,
    values: Annotated[str | None, Option(help=_VALUES_HELP)] = None,
    compute: Annotated[str | None, Option(metavar="TIME", help=_COMPUTE_HELP)] = None,
    workers: Annotated[int | None, Option(min=1, help=_WORKERS_HELP)] = None,
    profile_out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the measured profile there.")
    ] = None,
    profile_steps: Annotated[int, Option(min=4, help="Steps that are measured.")] = 20,
    ranks: Annotated[int | None, Option(help=_RANKS_HELP)] = None,
    *,
    network: NetworkOptions,
    codec: Annotated[
        list[str] | None, Option("--codec", "-c", help=_CODEC_HELP, autocompletion=complete_codec)
    ] = None,
    exchange: Annotated[
        list[str] | None, Option(help=_EXCHANGE_HELP, autocompletion=complete_exchange)
    ] = None,
    servers: ServersOption = None,
    every: EveryOption = 1,
    fragments: Annotated[int, Option(min=1, help=_FRAGMENTS_HELP)] = 1,
    delay: Annotated[int, Option(min=0, help=_DELAY_HELP)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a training step with each codec and exchange, and say which to take.

    Needs a profile of the model, measured in a few steps, or its size and the time of a step; and
    the network. With --profile-out and without --bandwidth, the profile is measured and nothing is
    predicted. With --every, all rows but DDP's are local steps, which train in another way; a row
    is the mean of --every steps.
    """
    # Wrong options are found before anything is measured.
    _check_source(context, profile, model, values, compute)
    codecs, exchanges = codec or (), exchange or ()
    for text in codecs:
        check_codec(text)
    count = None if values is None else parse_count(values, "--values")
    seconds = None if compute is None else parse_seconds(compute, "--compute")
    if ranks is not None:
        check_rank_count(ranks)
    check_servers(servers or 0, exchanges, every)
    check_exchanges(codecs, exchanges)
    schedule = _schedule(every, fragments, delay)
    known = None if profile is None else read_profile(profile)
    if network.bandwidth is not None:
        network.cluster(ranks or workers or (known.workers if known else 2), servers)
    if profile_out is not None:
        _check_writable(profile_out)
    if known is not None:
        measured = known
    elif count is not None:
        assert seconds is not None
        _warn_if_busy()
        measured = assume_profile(count, seconds, codecs or CODECS)
    else:
        assert model is not None
        measured = _measure(model, workers or ranks or 2, codecs or CODECS, profile_steps)
    if profile_out is not None:
        measured.write(profile_out)
        if network.bandwidth is None:
            say(f"wrote {profile_out}")
            return
    cluster = network.cluster(ranks or measured.workers, servers)
    made = make_plan(measured, cluster, codecs, exchanges, schedule=schedule)
    if as_json:
        print_json(_document(measured, cluster, made))
    else:
        print_plan(measured, cluster, made)


def _check_source(
    context: Context,
    profile: Path | None,
    model: str | None,
    values: str | None,
    compute: str | None,
) -> None:
    """Raises PlanError unless there is one profile, and no option for another one."""
    if profile is None and model is None and values is None:
        raise PlanError(
            "a plan needs the profile of a model: --profile FILE, or --model NAME to measure one "
            "here (--profile-out FILE keeps it), or --values 7B --compute 800ms for a model that "
            "is not here"
        )
    if profile is not None and model is not None:
        raise PlanError(
            f"give one of --profile and --model: the profile is that of {profile}, or {model} is "
            "measured here"
        )
    if values is not None and (profile, model) != (None, None):
        raise PlanError(
            f"give --values {values}, or one of --profile and --model, which say how many values "
            "the model has"
        )
    if (values is None) != (compute is None):
        raise PlanError(
            "--values and --compute go together: --values 7B --compute 800ms is a model of so many "
            "values whose step computes so long"
        )
    if model is not None:
        return
    for name, why in (
        ("workers", "says how many processes computed at once"),
        ("profile_steps", "has been measured"),
    ):
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE"):
            option = "--" + name.replace("_", "-")
            source = f"--values {values}" if profile is None else "the profile of --profile"
            raise PlanError(f"{option} goes with --model: {source} {why}")


def _schedule(every: int, fragments: int, delay: int) -> Schedule | None:
    if every == 1 and (fragments > 1 or delay > 0):
        raise PlanError(
            "--fragments and --delay are for local steps: give --every, a number from 2"
        )
    try:
        return Schedule(every, fragments, delay) if every != 1 else None
    except ValueError as error:
        raise PlanError(f"local steps: {error}") from error


def _check_writable(file: Path) -> None:
    """Raises OSError. Leaves no new file, because the measurement may fail."""
    is_new = not file.exists()
    file.open("a").close()
    if is_new:
        file.unlink()


def _measure(model: str, workers: int, codecs: list[str] | tuple[str, ...], steps: int) -> Profile:
    from gradwire_lab.plan.measure import measure_profile
    from gradwire_lab.train.options import from_options
    from gradwire_lab.train.settings import SHARDED

    _warn_if_busy()
    options = {"model": model, "workers": workers, "steps": steps, "exchange": SHARDED, "every": 1}
    return measure_profile(from_options(options), codecs, steps)


def _warn_if_busy() -> None:
    load, cores = load_average(), len(os.sched_getaffinity(0))
    if load is not None and is_busy(load, cores):
        warn(
            f"other work keeps this machine busy (load average {load:.1f}, cores: {cores}), so the "
            "times of the profile will be too long: measure again when it is idle"
        )


def _document(profile: Profile, cluster: Cluster, made: Plan) -> dict[str, Any]:
    return {
        "kind": "gradwire-plan",
        "model": profile.model,
        "values": profile.numel,
        "compute_seconds": profile.compute_seconds,
        "cluster": asdict(cluster),
        "predictions": [asdict(prediction) for prediction in made.predictions],
        "choice": asdict(made.choice),
        "pays": made.pays,
        "doubts": list(made.doubts),
        "advice": made.advice(),
    }
