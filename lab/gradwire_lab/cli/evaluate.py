"""``gradwire evaluate``."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, BadParameter, Option

from gradwire.cli.output import JsonOption, print_json, warn
from gradwire.errors import UserError
from gradwire_lab.cli.records import with_record
from gradwire_lab.evaluate import (
    diloco,
    frontier,
    inceptionn,
    larger,
    qsgd,
    terngrad,
    three_lc,
)
from gradwire_lab.evaluate.arms import RESNETS, Setup
from gradwire_lab.train.recipes import IMAGES

if TYPE_CHECKING:
    from gradwire_lab.evaluate.store import Line

_EVALUATIONS = {
    module.EVALUATION.name: module.EVALUATION
    for module in (frontier, three_lc, terngrad, qsgd, inceptionn, diloco, larger)
}
_NAMES_HELP = f"{', '.join(_EVALUATIONS)}. Default: all."
_OUT_HELP = "Runs, pages and pictures; a run that is there is not repeated."


class EvaluateError(UserError):
    """A folder does not fit the command. The message says why."""


@with_record("setup", Setup)
def evaluate(
    names: Annotated[list[str] | None, Argument(metavar="[NAME]...", help=_NAMES_HELP)] = None,
    out: Annotated[Path, Option(metavar="DIR", help=_OUT_HELP)] = Path("evaluation"),
    experiment: Annotated[
        str, Option(metavar="TITLE", help="Make the runs of experiments whose title begins so.")
    ] = "",
    draw_only: Annotated[
        bool, Option("--draw-only", help="Write the pages from the runs that are there.")
    ] = False,
    *,
    setup: Setup,
    as_json: JsonOption = False,
) -> None:
    """Repeat the papers' evaluations at a scale that two cores can train, beside their numbers.

    Many hours of training. Each run adds a line, and the next call goes on from there; several
    calls with the same --out share the work. Each evaluation gets a page (Markdown) with tables and
    pictures of what is there.
    """
    from gradwire_lab.evaluate import page, runner
    from gradwire_lab.evaluate.store import Store
    from gradwire_lab.train import data as data_sets
    from gradwire_lab.train import run
    from gradwire_lab.train.progress import say
    from gradwire_lab.train.settings import TrainSettings

    chosen = names or list(_EVALUATIONS)
    for name in chosen:
        if name not in _EVALUATIONS:
            raise BadParameter(f"'{name}' is no evaluation; valid are {', '.join(_EVALUATIONS)}")
    for value, valid in ((setup.resnet, RESNETS), (setup.data, IMAGES)):
        if value not in valid:
            raise BadParameter(f"unknown value '{value}'; valid are {', '.join(valid)}")
    store = Store(out / f"runs{setup.suffix}", setup)
    arms = [one for name in chosen for one in _EVALUATIONS[name].arms(experiment)]
    if not arms:
        raise BadParameter(f"no experiment of {', '.join(chosen)} is called '{experiment}'")
    settings = [one.settings(0, setup) for one in arms]  # raises for what does not go together
    _check_places(out, store.folder)
    if draw_only:
        _check_runs(out, store.folder)
    else:
        for given in {(one.data, one.data_dir) for one in settings}:
            data_sets.load(*given)
    run.prepare(TrainSettings(device=setup.device), run.Destinations(plots=out))
    console, failed, described = Console(stderr=as_json), 0, []
    try:
        with _stopped_by_sigterm():
            for name in chosen:
                evaluation, path = _EVALUATIONS[name], out / f"{name}{setup.suffix}.md"
                try:
                    if not draw_only:
                        failed += runner.make(evaluation.arms(experiment), store, console)
                finally:
                    found, lines, unusable = runner.read(evaluation.arms(), store)
                    machines = page.describe_machines(lines)
                    written = page.write(
                        evaluation, found, machines, _command(name, out, setup), path
                    )
                    texts = [f"not used: {text}" for text in unusable]
                    say(console, "\n".join([*texts, *(f"wrote {p}" for p in written)]))
                runs = [_described(line) for line in lines]
                described.append({"name": name, "page": str(path), "runs": runs})
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated)
        text = "terminated" if terminated else "interrupted"
        if not draw_only:
            left = runner.count_missing(arms, store)
            text += f"; {left} run{'' if left == 1 else 's'} left; the same command goes on"
        warn(text)
        number = signal.SIGTERM if terminated else signal.SIGINT
        raise typer.Exit(128 + number) from None
    if as_json:
        print_json({"evaluations": described, "failed": failed})
    if failed:
        raise typer.Exit(1)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Lets `finally` run when SIGTERM comes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_places(out: Path, runs: Path) -> None:
    """Raises EvaluateError if a folder of results is a file."""
    for folder in (out, runs):
        if folder.exists() and not folder.is_dir():
            raise EvaluateError(f"{folder} is a file; results need a folder")


def _check_runs(out: Path, runs: Path) -> None:
    """Raises EvaluateError if there is nothing to draw."""
    if any(runs.glob("*.jsonl")):
        return
    others = sorted(str(other) for other in out.glob("runs*") if any(other.glob("*.jsonl")))
    raise EvaluateError(
        f"no runs in {runs}, but in {', '.join(others)}: give the options of these runs, such as "
        "--scale"
        if others
        else f"no runs in {runs}: without --draw-only the command makes them"
    )


def _command(name: str, out: Path, setup: Setup) -> str:
    """What makes the runs of a page."""
    words = ["gradwire", "evaluate", name, "--out", out]
    for option in fields(Setup):
        if (value := getattr(setup, option.name)) != option.default:
            words += [f"--{option.name.replace('_', '-')}", value]
    return shlex.join(map(str, words))


def _described(line: Line) -> dict[str, Any]:
    """The numbers of a run; the files have more."""
    result = line.result
    return {
        "model": line.settings["model"],
        "codec": result.codec,
        "seed": result.seed,
        "settings": line.settings,
        "metric": line.metric,
        "final": result.final,
        "seconds": result.measured_seconds,
        "push_bits": result.push_bits_per_value,
        "pull_bits": result.pull_bits_per_value,
        "push_payload_bits": result.push_payload_bits,
        "pull_payload_bits": result.pull_payload_bits,
    }
