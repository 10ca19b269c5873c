"""`gradwire train` from its settings to its results."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire.machine import describe_build, describe_machine
from gradwire.train import data, launcher, network, report, settings, worker
from gradwire.train.errors import TrainError
from gradwire.train.estimate import estimate_seconds
from gradwire.train.progress import Display, say
from gradwire.train.records import RankRecord
from gradwire.train.settings import TrainSettings, format_bandwidth


@dataclass(frozen=True)
class Outputs:
    """Where results go besides the table. json: a path, `-` for stdout."""

    json: str | None = None
    plots: Path | None = None


def prepare(chosen: TrainSettings, outputs: Outputs) -> None:
    """Fails now rather than after the training: TrainError if a package or the device is missing,
    OSError if a place cannot be written to."""
    needed = ["torch"] + (["matplotlib"] if outputs.plots else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainError(
            f"{' and '.join(missing)} not installed; `pip install 'gradwire[train]'` brings it"
        )
    if settings.is_cuda(chosen.device):
        from gradwire.train import devices

        devices.check_usable(chosen)
    if outputs.plots is not None:
        outputs.plots.mkdir(parents=True, exist_ok=True)
    if outputs.json not in (None, "-"):
        path = Path(outputs.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()


def train_here(chosen: TrainSettings, outputs: Outputs, console: Console) -> report.Report:
    """Starts the workers on this machine, trains with every codec and reports.

    Raises TrainError. KeyboardInterrupt passes through when everything has ended.
    """
    prepare(chosen, outputs)
    data.locate(chosen.data, chosen.data_dir)
    conditions = _conditions(chosen)
    follower = _Follower(chosen, console, conditions)
    try:
        with follower.display:
            records = launcher.run_workers(chosen, conditions.shaped, follower.follow)
    except KeyboardInterrupt:
        follower.show_written()
        raise
    follower.show_written()
    return follower.report(records, outputs)


def train_under_torchrun(
    chosen: TrainSettings, outputs: Outputs, console: Console, rank: int, world: int
) -> report.Report | None:
    """Joins the ranks that torchrun started; rank 0 reports, the others return None."""
    prepare(chosen, outputs)
    from gradwire.torch.link.errors import CommunicationError

    try:
        if chosen.exchange == settings.ONE_PROCESS:
            raise settings.SettingsError("--exchange", f"{chosen.exchange} goes without torchrun")
        chosen = replace(chosen, workers=world - (chosen.ranks - chosen.workers), bandwidth=None)
        settings.check(chosen)
    except settings.SettingsError as error:
        raise TrainError(f"{world} ranks of torchrun: {error.option}: {error}") from error
    note = "the network between torchrun's ranks, as it is"
    conditions = report.Conditions(shaped=False, modelled=False, note=note)
    follower = _Follower(chosen, console if rank == 0 else Console(quiet=True), conditions)
    try:
        with follower.display:
            records = worker.run_under_torchrun(chosen, rank, partial(follower.follow, rank))
    except (TrainError, CommunicationError) as error:
        raise TrainError(f"rank {rank}: {error}") from error
    return None if records is None else follower.report(records, outputs)


def _conditions(chosen: TrainSettings) -> report.Conditions:
    """The links of a training on this machine, shaped if this is needed and possible."""
    if chosen.exchange == settings.ONE_PROCESS:
        note = "none: nothing is sent, times are those of the computation"
    elif chosen.bandwidth is None:
        note = "loopback, no limit asked for"
    elif (reason := network.why_not_shaped()) is not None:
        return report.Conditions(shaped=False, modelled=True, note=reason)
    else:
        return report.Conditions(shaped=True, modelled=False)
    return report.Conditions(shaped=False, modelled=False, note=note)


class _Follower:
    """Tells the user the plan, the progress and the results."""

    def __init__(
        self, chosen: TrainSettings, console: Console, conditions: report.Conditions
    ) -> None:
        self._conditions = conditions
        self.display = Display(console, chosen.steps)
        self._settings = chosen
        self._console = console
        self._parameters = 0
        self._speeds: list[dict[str, Any]] = []
        self._written: dict[str, list[int]] = {}
        self._expected = 1 if worker.world_of_torchrun() else chosen.worker_ranks
        self._announce()

    def _announce(self) -> None:
        chosen = self._settings
        bandwidth = format_bandwidth(chosen.bandwidth)
        links = self._conditions.note
        if self._conditions.shaped:
            links = f"{bandwidth} each way, every worker behind a link of its own"
        elif self._conditions.modelled:
            links = f"NOT SHAPED; times for {bandwidth} will be modelled"
            warning = (
                f"WARNING: the links cannot be limited to {bandwidth}: {self._conditions.note}.\n"
                "The workers will talk over loopback, and the report will hold MODELLED times."
            )
            say(self._console, warning, style="bold red")
        rate = chosen.learning_rate * chosen.workers
        text = (
            f"training   {chosen.model} on {chosen.data}, {chosen.steps} steps of "
            f"{chosen.workers} workers x {chosen.batch} images, seed {chosen.seed}\n"
            f"optimizer  SGD, momentum {settings.MOMENTUM}, weight decay {settings.WEIGHT_DECAY}, "
            f"learning rate {rate:g} to {rate / 100:g} (cosine)\n"
            f"device     {chosen.device}\n"
            f"links      {links}\n"
            f"exchange   {_exchange_text(chosen)}\n"
            f"codecs     {', '.join(chosen.codecs)}, one after the other"
        )
        say(self._console, text)

    def follow(self, rank: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self._speeds.append(event)
            if len(self._speeds) == self._expected:
                self._estimate()
        elif kind == "stderr":
            self._written.setdefault(event["line"], []).append(rank)
        elif rank == 0:
            self.display.show(event)

    def show_written(self) -> None:
        """Prints the workers' output on stderr, such as warnings. Equal lines are printed once."""
        for line, ranks in self._written.items():
            who = self._settings.names(sorted(set(ranks)))
            say(self._console, f"{who}: {line}", style="dim")

    def report(self, records: list[list[RankRecord]], outputs: Outputs) -> report.Report:
        """Reports the records of all ranks for each codec."""
        finished = report.assemble(self._settings, self._parameters, self._conditions, records)
        lines = report.footnotes(finished)
        if outputs.json is not None:
            machine = describe_machine()
            machine |= {"gradwire": describe_build(), "torch": version("torch")}
            text = json.dumps(finished.to_json(machine), indent=2, allow_nan=False)
            if outputs.json == "-":
                print(text)
            else:
                Path(outputs.json).write_text(text + "\n", encoding="utf-8")
                lines.append(f"wrote {outputs.json}")
        if outputs.plots is not None:
            from gradwire.train import plots

            lines += [f"wrote {path}" for path in plots.write(finished, outputs.plots)]
        self._console.print(report.table(finished))
        say(self._console, "\n".join(lines))
        return finished

    def _estimate(self) -> None:
        self._parameters = self._speeds[0]["parameters"]
        bandwidth = self._settings.bandwidth if self._conditions.shaped else None
        estimates = estimate_seconds(
            replace(self._settings, bandwidth=bandwidth),
            self._parameters,
            max(speed["step_seconds"] for speed in self._speeds),
            min(speed["evaluation_seconds"] for speed in self._speeds),
        )
        parts = ", ".join(f"{codec} {_duration(seconds)}" for codec, seconds in estimates.items())
        total = _duration(sum(estimates.values()))
        say(self._console, f"parameters {self._parameters:,}\nestimate   {total} ({parts})")


def _exchange_text(chosen: TrainSettings) -> str:
    if chosen.exchange == settings.SERVER:
        backup = f", {chosen.backup_workers} backup workers" if chosen.backup_workers else ""
        return f"{chosen.exchange}, every step, servers: {chosen.servers}{backup}"
    if chosen.every == 1:
        return f"{chosen.exchange}, every step"
    between = "local ones between"
    if chosen.exchange == settings.ONE_PROCESS:
        between = "gradients are summed between"
    return f"{chosen.exchange}, every {chosen.every} steps, {between}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
