"""``gradwire evaluate``."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, BadParameter, Option

from gradwire.cli.output import JsonOption, print_json, warn
from gradwire.errors import UserError
from gradwire_lab.evaluate import frontier, inceptionn, qsgd, terngrad, three_lc
from gradwire_lab.evaluate.arms import RESNETS, Setup
from gradwire_lab.train.recipes import IMAGES

_EVALUATIONS = {
    module.EVALUATION.name: module.EVALUATION
    for module in (frontier, three_lc, terngrad, qsgd, inceptionn)
}
_NAMES_HELP = f"{', '.join(_EVALUATIONS)}. Default: all."
_OUT_HELP = "Runs, pages and pictures; a run that is there is not repeated."
_RESNET_HELP = f"{', '.join(RESNETS)}; from resnet20 on with 3LC's 25,600 steps."


_INTERRUPTED_STATUS, _TERMINATED_STATUS = (128 + n for n in (signal.SIGINT, signal.SIGTERM))


class EvaluateError(UserError):
    """A folder does not fit the command. The message says why."""


def evaluate(
    names: Annotated[list[str] | None, Argument(metavar="[NAME]...", help=_NAMES_HELP)] = None,
    out: Annotated[Path, Option(metavar="DIR", help=_OUT_HELP)] = Path("evaluation"),
    draw_only: Annotated[
        bool, Option("--draw-only", help="Write the pages from the runs that are there.")
    ] = False,
    scale: Annotated[
        float, Option(help="Share of the steps, for a trial.", min=0.0001, max=1.0)
    ] = 1.0,
    resnet: Annotated[str, Option(help=_RESNET_HELP)] = RESNETS[0],
    data: Annotated[str, Option(help=f"{', '.join(IMAGES)}.")] = "fashion-mnist",
    data_dir: Annotated[Path | None, Option(help="Folder of the images.")] = None,
    device: Annotated[str, Option(help="cpu, cuda, cuda:K.")] = "cpu",
    threads: Annotated[int, Option(help="Threads of a training.", min=1, max=256)] = 1,
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
    for value, valid in ((resnet, RESNETS), (data, IMAGES)):
        if value not in valid:
            raise BadParameter(f"unknown value '{value}'; valid are {', '.join(valid)}")
    setup = Setup(scale, resnet, data, data_dir, device, threads)
    store = Store(out / f"runs{setup.suffix}", setup)
    arms = [one for name in chosen for one in _EVALUATIONS[name].arms()]
    settings = [one.settings(0, setup) for one in arms]  # raises for what does not go together
    _check_places(out, store.folder)
    if draw_only:
        _check_runs(out, store.folder)
    else:
        for given in {(one.data, one.data_dir) for one in settings}:
            data_sets.locate(*given)
    run.prepare(TrainSettings(device=device), run.Destinations(plots=out))
    console, failed, described = Console(stderr=as_json), 0, []
    try:
        with _stopped_by_sigterm():
            for name in chosen:
                evaluation = _EVALUATIONS[name]
                try:
                    if not draw_only:
                        failed += runner.make(evaluation.arms(), store, console)
                finally:
                    found, documents, unusable = runner.read(evaluation.arms(), store)
                    machines = page.describe_machines(documents)
                    command = _command(name, out, setup)
                    path = out / f"{name}{setup.suffix}.md"
                    written = page.write(evaluation, found, machines, command, path)
                    lines = [f"not used: {line}" for line in unusable]
                    say(console, "\n".join([*lines, *(f"wrote {p}" for p in written)]))
                runs = _described(documents)
                described.append({"name": name, "page": str(path), "runs": runs})
    except (KeyboardInterrupt, _Sigterm) as stop:
        terminated = isinstance(stop, _Sigterm)
        text = "terminated" if terminated else "interrupted"
        if not draw_only:
            left = runner.count_missing(arms, store)
            text += f"; {left} run{'' if left == 1 else 's'} left; the same command goes on"
        warn(text)
        raise typer.Exit(_TERMINATED_STATUS if terminated else _INTERRUPTED_STATUS) from None
    if as_json:
        print_json({"evaluations": described, "failed": failed})
    if failed:
        raise typer.Exit(1)


class _Sigterm(BaseException):
    """SIGTERM came."""


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Lets `finally` run when SIGTERM comes, which raises _Sigterm in the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Sigterm

    main = threading.current_thread() is threading.main_thread()  # others may set no handler
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


def _described(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of each run; the files have more."""
    counted = ("push_bits", "pull_bits", "push_payload_bits", "pull_payload_bits")
    names = {"push_bits": "push_bits_per_value", "pull_bits": "pull_bits_per_value"}
    return [
        {
            "model": document["settings"]["model"],
            "codec": document["result"].codec,
            "seed": document["result"].seed,
            "settings": document["settings"],
            "metric": document["metric"],
            "final": document["result"].final,
            "seconds": document["result"].measured_seconds,
            **{name: getattr(document["result"], names.get(name, name)) for name in counted},
        }
        for document in documents
    ]
