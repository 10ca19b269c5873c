"""``gradwire evaluate``."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, BadParameter, Option

from gradwire.cli.output import JsonOption, print_json
from gradwire.evaluate import frontier, inceptionn, qsgd, terngrad, three_lc
from gradwire.evaluate.arms import RESNETS, Setup
from gradwire.train.recipes import IMAGES

_EVALUATIONS = {
    module.EVALUATION.name: module.EVALUATION
    for module in (frontier, three_lc, terngrad, qsgd, inceptionn)
}
_NAMES_HELP = f"{', '.join(_EVALUATIONS)}. Default: all."
_OUT_HELP = "Runs, pages and pictures; a run that is there is not repeated."
_RESNET_HELP = f"{', '.join(RESNETS)}; from resnet20 on with 3LC's 25,600 steps."


def evaluate(
    names: Annotated[list[str] | None, Argument(metavar="[NAME]...", help=_NAMES_HELP)] = None,
    out: Annotated[Path, Option(metavar="DIR", help=_OUT_HELP)] = Path("evaluation"),
    draw_only: Annotated[
        bool, Option("--draw-only", help="Write the pages from the runs that are there.")
    ] = False,
    scale: Annotated[
        float, Option(help="So many of the steps, for a trial.", min=0.0001, max=1.0)
    ] = 1.0,
    resnet: Annotated[str, Option(help=_RESNET_HELP)] = RESNETS[0],
    data: Annotated[str, Option(help=f"{', '.join(IMAGES)}.")] = "fashion-mnist",
    data_dir: Annotated[Path | None, Option(help="Folder of the images.")] = None,
    device: Annotated[str, Option(help="cpu, cuda, cuda:K.")] = "cpu",
    threads: Annotated[int, Option(help="Threads of a training.", min=1, max=256)] = 1,
    as_json: JsonOption = False,
) -> None:
    """Repeat the papers' evaluations at a scale that two cores can train, beside their numbers.

    Many hours of training. Each run becomes a file, and the next call goes on from there; several
    calls with the same --out share the work. Each evaluation gets a page (Markdown) with tables and
    pictures of what is there.
    """
    from gradwire.evaluate import page, runner
    from gradwire.evaluate.store import Store
    from gradwire.train import data as data_sets
    from gradwire.train import run
    from gradwire.train.progress import say
    from gradwire.train.settings import TrainSettings

    chosen = names or list(_EVALUATIONS)
    for name in chosen:
        if name not in _EVALUATIONS:
            raise BadParameter(f"'{name}' is no evaluation; valid are {', '.join(_EVALUATIONS)}")
    for value, valid in ((resnet, RESNETS), (data, IMAGES)):
        if value not in valid:
            raise BadParameter(f"unknown value '{value}'; valid are {', '.join(valid)}")
    setup = Setup(scale, resnet, data, data_dir, device, threads)
    arms = [one for name in chosen for one in _EVALUATIONS[name].arms()]
    settings = [one.settings(0, setup) for one in arms]  # raises for what does not go together
    if not draw_only:
        for given in {(one.data, one.data_dir) for one in settings}:
            data_sets.locate(*given)
    run.prepare(TrainSettings(device=device), run.Outputs(plots=out))
    store = Store(out / f"runs{setup.suffix}", setup)
    console, failed, described = Console(stderr=as_json), 0, []
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
            lines = [f"not used: {line}" for line in unusable] + [f"wrote {p}" for p in written]
            say(console, "\n".join(lines))
        described.append({"name": name, "page": str(path), "runs": _described(documents)})
    if as_json:
        print_json({"evaluations": described, "failed": failed})
    if failed:
        raise typer.Exit(1)


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
