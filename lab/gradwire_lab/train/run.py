"""`gradwire train` from its settings to its results."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rich.console import Console

from gradwire.errors import missing
from gradwire.files import write_text
from gradwire.machine import describe_build, describe_machine
from gradwire_lab.train import (
    checks,
    data,
    describe,
    launcher,
    network,
    page,
    report,
    report_table,
    settings,
    worker,
)
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.estimate import estimate_seconds
from gradwire_lab.train.progress import Display, say
from gradwire_lab.train.records import RankRecord
from gradwire_lab.train.results import Results
from gradwire_lab.train.settings import Run, SettingsError, TrainSettings, format_bandwidth


@dataclass(frozen=True)
class Destinations:
    """Where results go besides the table. json: a path, `-` for stdout. out: a folder for a file of
    each run; runs that it holds are not repeated. page: of a web page, in a folder that exists."""

    json: str | None = None
    plots: Path | None = None
    out: Path | None = None
    page: Path | None = None


def describe_place() -> dict[str, Any]:
    """The machine and the build that a result is made with."""
    return describe_machine() | {"gradwire": describe_build(), "torch": version("torch")}


def prepare(chosen: TrainSettings, outputs: Destinations) -> None:
    """Fails now rather than after the training: TrainError if a package or the device is missing,
    OSError if a place cannot be written to."""
    needed = ["torch"] + (["matplotlib"] if outputs.plots else [])
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        raise TrainError(missing(" and ".join(lacking), "'./lab[train]'"))
    if settings.is_cuda(chosen.device):
        from gradwire_lab.train import devices

        devices.check_usable(chosen)
    if outputs.page is not None:
        page.check(outputs.page)
    for folder in filter(None, (outputs.plots, outputs.out)):
        if folder.exists() and not folder.is_dir():
            raise TrainError(f"{folder} is a file; results need a folder")
        folder.mkdir(parents=True, exist_ok=True)
    for place in {outputs.plots, outputs.out, outputs.page and outputs.page.parent} - {None}:
        try:
            TemporaryFile(dir=place).close()
        except OSError as error:
            raise TrainError(f"{place} cannot be written to: {error.strerror}") from error
    if outputs.json not in (None, "-"):
        path = Path(outputs.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink(missing_ok=True)


def train_here(chosen: TrainSettings, outputs: Destinations, console: Console) -> report.Report:
    """Starts the workers on this machine, trains with every codec and reports.

    Raises TrainError. KeyboardInterrupt passes through when everything has ended.
    """
    prepare(chosen, outputs)
    follower = _Follower(chosen, console, _conditions(chosen), outputs)
    try:
        with follower.display:
            while follower.pending:  # again if a worker was lost on the way
                shaped = follower.conditions.shaped
                launcher.run_workers(chosen, follower.pending, shaped, follower.follow)
    finally:
        follower.show_written()
    return follower.report()


def train_under_torchrun(
    chosen: TrainSettings, outputs: Destinations, console: Console, rank: int, world: int
) -> report.Report | None:
    """Joins the ranks that torchrun started; rank 0 reports, the others return None."""
    if rank != 0:  # its machine may lack the places
        console, outputs = Console(quiet=True), Destinations()
    prepare(chosen, outputs)
    from gradwire.torch.errors import CommunicationError

    try:
        if chosen.in_one_process:
            raise SettingsError("--exchange", f"{chosen.exchange} goes without torchrun")
        workers = world - (chosen.ranks - chosen.workers)
        chosen = replace(chosen, workers=workers, bandwidth=None, latency=0.0)
        checks.check(chosen)
    except SettingsError as error:
        raise TrainError(f"{world} ranks of torchrun: {error.option}: {error}") from error
    note = "the network between torchrun's ranks, as it is"
    conditions = report.Conditions(shaped=False, modelled=False, note=note)
    try:
        follower = _Follower(chosen, console, conditions, outputs)
        with follower.display:
            follow = partial(follower.follow, rank)
            worker.run_under_torchrun(chosen, follower.pending, rank, follow)
    except (TrainError, CommunicationError) as error:
        raise TrainError(f"rank {rank}: {error}") from error
    return follower.report() if rank == 0 else None


def _conditions(chosen: TrainSettings) -> report.Conditions:
    """The links of a training on this machine, shaped if this is needed and possible."""
    if chosen.in_one_process:
        note = "none: nothing is sent, times are those of the computation"
    elif chosen.bandwidth is None:
        note = "loopback, no limit asked for"
    else:
        reason = network.why_not_shaped(chosen.latency > 0)
        if reason is not None and chosen.latency > 0:
            raise TrainError(f"the links cannot have a latency: {reason}")
        return report.Conditions(reason is None, reason is not None, reason or "")
    return report.Conditions(shaped=False, modelled=False, note=note)


class _Follower:
    """Tells the user the plan, the progress and the results, and keeps the results."""

    def __init__(
        self,
        chosen: TrainSettings,
        console: Console,
        conditions: report.Conditions,
        outputs: Destinations,
    ) -> None:
        self.conditions = conditions
        self.display = Display(console, chosen.steps, chosen.metric)
        self._settings, self._console, self._outputs = chosen, console, outputs
        self._data = data.load(chosen.data, chosen.data_dir).describe()
        self._init = "" if chosen.init is None else _digest(chosen.init)
        self._kept = Results(outputs.out, chosen, conditions, self._data, self._init)
        self._results = self._kept.found()
        known = [document["parameters"] for document in self._kept.documents.values()]
        self._parameters: int = known[-1] if known else 0  # of the model
        self._speeds: list[dict[str, Any]] = []
        self._arrived: defaultdict[Run, dict[int, RankRecord]] = defaultdict(dict)
        # Workers that ended before their run, and why.
        self._lost: defaultdict[Run, list[str]] = defaultdict(list)
        self._written: defaultdict[str, set[int]] = defaultdict(set)
        self._announce()

    @property
    def pending(self) -> list[Run]:
        return [run for run in self._settings.runs() if run not in self._results]

    def _announce(self) -> None:
        chosen = self._settings
        bandwidth = format_bandwidth(chosen.bandwidth)
        links = self.conditions.note
        if self.conditions.shaped:
            each = "worker" if chosen.ranks_per_machine == 1 else "machine"
            links = f"{chosen.links} each way, every {each} behind a link of its own"
        elif self.conditions.modelled:
            links = f"NOT SHAPED; times for {bandwidth} will be modelled"
            warning = (
                f"WARNING: the links cannot be limited to {bandwidth}: {self.conditions.note}.\n"
                "The workers will talk over loopback, and the report will hold MODELLED times."
            )
            say(self._console, warning, style="bold red")
        seeds = f"seed {chosen.seed}"
        if chosen.seeds > 1:
            seeds = f"seeds {chosen.seed} to {chosen.seed + chosen.seeds - 1}"
        text = (
            f"training   {chosen.model} on {chosen.data}, {chosen.steps} steps of "
            f"{chosen.workers} workers x {chosen.batch}, {seeds}\n"
            f"optimizer  {describe.optimizer(chosen)}\n"
            f"device     {chosen.device}\n"
            f"links      {links}\n"
            f"exchange   {describe.exchange(chosen)}\n"
            f"codecs     {', '.join(chosen.codecs)}, one after the other"
        )
        if done := len(self._results):
            runs = len(chosen.runs())
            text += f"\nresumed    {done} of {runs} runs are in {self._outputs.out}"
        say(self._console, text)

    def follow(self, rank: int, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self._speeds.append(event)
                chosen = self._settings
                here = 1 if worker.world_of_torchrun() else min(chosen.processes, chosen.workers)
                if len(self._speeds) == here:
                    self._estimate()
            case "stderr":
                self._written[event["line"]].add(rank)
            case "records":
                for record in event["records"]:
                    run = Run(record.codec, record.seed)
                    self._arrived[run][record.rank] = record
                self._keep(run)
            case "lost":
                self._lost[event["run"]].append(event["why"])
                self._keep(event["run"])
            case _ if rank == 0:
                self.display.show(event)

    def show_written(self) -> None:
        """Prints the workers' output on stderr, such as warnings. Equal lines are printed once."""
        for line, ranks in self._written.items():
            say(self._console, f"{self._settings.names(sorted(ranks))}: {line}", style="dim")

    def _keep(self, run: Run) -> None:
        """Keeps the result of a run when the records of all ranks are there."""
        own, lost, arrived = self._settings.of_run(run), self._lost[run], self._arrived[run]
        ranks = range(own.of_ranks().ranks)
        if len(arrived) + len(lost) == len(ranks):
            records = [
                arrived.get(rank) or RankRecord(run.codec, rank, seed=run.seed) for rank in ranks
            ]
            del self._arrived[run]
            self._results[run] = report.result_of(
                self._settings, self._parameters, self.conditions, records, lost
            )
            self._kept.add(self._report_of(own, [run]), describe_place())

    def _report_of(self, chosen: TrainSettings, runs: list[Run]) -> report.Report:
        results = [self._results[run] for run in runs]
        return report.Report(
            chosen, self._parameters, self._data, self.conditions, results, self._init
        )

    def report(self) -> report.Report:
        made, outputs = self._report_of(self._settings, self._settings.runs()), self._outputs
        self._console.print(report_table.table(made))  # first: a disk may be full by now
        written: list[object] = []
        if outputs.json is not None:
            text = json.dumps(made.to_json(describe_place()), indent=2, allow_nan=False)
            if outputs.json == "-":
                print(text)
            else:
                write_text(Path(outputs.json), text)
                written.append(outputs.json)
        if outputs.plots is not None:
            from gradwire_lab.train import plots

            written += plots.write(made, outputs.plots)
        if outputs.page is not None:
            page.write([made], [describe_place()], outputs.page)
            written.append(outputs.page)
        notes = report_table.footnotes(made) + [f"wrote {path}" for path in written]
        say(self._console, "\n".join(notes))
        return made

    def _estimate(self) -> None:
        chosen, self._parameters = self._settings, self._speeds[0]["parameters"]
        estimates = estimate_seconds(
            chosen if self.conditions.shaped else replace(chosen, bandwidth=None),
            self._parameters,
            max(speed["step_seconds"] for speed in self._speeds),
            min(speed["evaluation_seconds"] for speed in self._speeds),
        )
        parts = ", ".join(f"{codec} {_duration(seconds)}" for codec, seconds in estimates.items())
        total = _duration(sum(estimates[run.codec] for run in self.pending))
        each = " each run" * (chosen.seeds > 1)
        say(
            self._console,
            f"data       {self._data}\n"
            f"parameters {self._parameters:,}\n"
            f"estimate   {total} ({parts}{each})",
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
