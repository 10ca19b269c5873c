"""Makes the runs of evaluations that are not there yet."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from gradwire_lab.evaluate.arms import Arm
from gradwire_lab.evaluate.found import DIVERGED, MOST_SEEDS, STOPPED, Found
from gradwire_lab.evaluate.store import ArmRun, Line, Store
from gradwire_lab.train import network
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.progress import say
from gradwire_lab.train.report import RunResult
from gradwire_lab.train.run import Destinations, train_here
from gradwire_lab.train.settings import TrainSettings

_POLL_SECONDS = 5.0


def runs_of(arms: Sequence[Arm]) -> list[ArmRun]:
    """First the seed 0 of every arm, then the others; last those that must be alone."""
    most = max((one.seeds for one in arms), default=0)
    runs = [ArmRun(one, seed) for seed in range(most) for one in arms if seed < one.seeds]
    return sorted(runs, key=lambda run: run.arm.timed)


def read(arms: Sequence[Arm], store: Store) -> tuple[Found, list[Line], list[str]]:
    """The results that are there, their lines, and a text for each line that cannot be used. Seeds
    beyond those of an arm, which another page wanted, count too: both pages show the same mean."""
    results: dict[Arm, dict[int, RunResult]] = {}
    observed, lines, unusable = {}, [], []
    for run in runs_of(arms):
        line, problem = _look(run, store)
        if problem:
            unusable.append(f"{store.path(run)}, {run.name}: {problem}")
        if line is not None:
            results.setdefault(run.arm, {})[run.seed] = line.result
            lines.append(line)
            if line.observed is not None:
                observed[run.arm] = line.observed
    for one in arms:
        for seed in range(one.seeds, MOST_SEEDS):
            line, _ = _look(ArmRun(one, seed), store)
            if line is None:
                break
            results.setdefault(one, {})[seed] = line.result
            lines.append(line)
    settings = {one: store.settings(ArmRun(one, 0)) for one in arms}
    return Found(results, settings, observed), lines, unusable


def make(arms: Sequence[Arm], store: Store, console: Console) -> int:
    """Trains what is missing, and waits for what other processes train in the same folder. Returns
    the number of runs that could not be made; their errors are printed."""
    store.folder.mkdir(parents=True, exist_ok=True)
    wanted, failed = runs_of(arms), 0
    pending = [run for run in wanted if _look(run, store)[0] is None]
    say(console, f"{len(wanted) - len(pending)} of {len(wanted)} runs are there")
    while pending:
        elsewhere = []
        for place, run in enumerate(pending):
            with store.claim(run) as mine:
                if not mine:
                    elsewhere.append(run)
                elif not _is_there(run, store, console):
                    left = len(pending) - place + len(elsewhere) - 1
                    failed += not _train(run, store, console, left)
        pending = [run for run in elsewhere if _look(run, store)[0] is None]
        if pending:
            time.sleep(_POLL_SECONDS)
    return failed


def count_missing(arms: Sequence[Arm], store: Store) -> int:
    """The runs that are not there, or not in a line that can be used."""
    return len({run.title for run in runs_of(arms) if _look(run, store)[0] is None})


def _look(run: ArmRun, store: Store) -> tuple[Line | None, str]:
    """The line of a run, or why it cannot be used."""
    try:
        return store.read(run), ""
    except ValueError as error:
        return None, str(error)


def _is_there(run: ArmRun, store: Store, console: Console) -> bool:
    line, problem = _look(run, store)
    if problem:
        text = f"cannot be used ({problem}); it stays, and the run is made again"
        say(console, f"{store.path(run)}, {run.name} {text}")
    return line is not None


def _train(run: ArmRun, store: Store, console: Console, left: int) -> bool:
    settings = store.settings(run)
    if run.arm.timed and (reason := network.why_not_shaped()) is not None:
        say(console, f"{run.title}: {reason}", style="bold red")
        return False
    title = run.title
    began = time.perf_counter()
    try:
        others = "the other runs end" if run.arm.timed else "the timed run ends"
        with store.quiet(run.arm.timed, lambda: say(console, f"{title} waits until {others}")):
            document = _train_or_observe(run.arm, settings)
    except TrainError as error:
        say(console, f"{title}: {error}", style="bold red")
        return False
    store.write(run, document)
    result = document["results"][0]
    end = STOPPED if result["failed"] else DIVERGED
    if result["final"] is not None:
        end = settings.metric.text(result["final"])
    seconds = time.perf_counter() - began
    say(console, f"{title}: {end} after {seconds:.0f} s; {left} runs left")
    return True


def _train_or_observe(one: Arm, settings: TrainSettings) -> dict[str, Any]:
    if one.observed:
        from gradwire_lab.evaluate.observe import train_and_observe

        return train_and_observe(settings, one.observed)
    with TemporaryDirectory() as folder:
        train_here(settings, Destinations(out=Path(folder)), Console(quiet=True))
        (path,) = Path(folder).iterdir()
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document
