"""`gradwire train` from its settings to its results."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire.train import data, devices, launcher, network, report, settings, worker
from gradwire.train.estimate import estimate_seconds
from gradwire.train.progress import Display
from gradwire.train.records import RankRecord
from gradwire.train.settings import TrainSettings, format_bandwidth


class CannotRunError(Exception):
    """Something that the run needs is not there, or a worker failed; the message says what."""


@dataclass(frozen=True)
class Outputs:
    """Where results go besides the table. json: a path, `-` for stdout."""

    json: str | None = None
    plots: Path | None = None


def prepare(chosen: TrainSettings, outputs: Outputs) -> None:
    """Fails now rather than after the training: CannotRunError for what is not installed and for a
    device that is not there, OSError for places that cannot be written to."""
    needed = ["torch"] + (["matplotlib"] if outputs.plots else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotRunError(
            f"{' and '.join(missing)} not installed; `pip install 'gradwire[train]'` brings it"
        )
    try:
        devices.check_usable(chosen)
    except devices.DeviceError as error:
        raise CannotRunError(str(error)) from error
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

    Raises CannotRunError. KeyboardInterrupt passes through, after everything was ended.
    """
    prepare(chosen, outputs)
    conditions = _shape_if_possible(chosen)
    follower = _Follower(chosen, console, conditions)
    try:
        data.locate(chosen.data, chosen.data_dir)
        follower.announce()
        with (
            Display(console, chosen.steps) as display,
            launcher.Workers(chosen, conditions.shaped) as workers,
        ):
            follower.display = display
            lists = workers.run(follower.follow)
    except (data.DataError, launcher.WorkerError, network.NetworkError) as error:
        raise CannotRunError(str(error)) from error
    except KeyboardInterrupt:
        follower.show_written()
        raise
    follower.show_written()
    records = [[RankRecord.from_json(record) for record in ranks] for ranks in lists]
    finished = report.assemble(chosen, follower.parameters, conditions, records)
    _publish(finished, outputs, console)
    return finished


def train_under_torchrun(
    chosen: TrainSettings, outputs: Outputs, console: Console
) -> report.Report | None:
    """Joins the ranks that torchrun started; rank 0 reports, the others return None."""
    prepare(chosen, outputs)
    rank, world = worker.world_of_torchrun()
    chosen = replace(chosen, workers=world - (chosen.ranks - chosen.workers), bandwidth=None)
    try:
        settings.check(chosen)
    except settings.SettingsError as error:
        raise CannotRunError(f"{world} ranks of torchrun: {error.option}: {error}") from error
    conditions = report.Conditions(
        shaped=False, modelled=False, note="the network between torchrun's ranks, as it is"
    )
    console = console if rank == 0 else Console(quiet=True)
    follower = _Follower(chosen, console, conditions)
    follower.announce()
    from gradwire.torch.errors import CommunicationError
    from gradwire.train.loop import DivergedError

    try:
        with Display(console, chosen.steps) as display:
            follower.display = display
            records = worker.run_under_torchrun(chosen, lambda event: follower.follow(rank, event))
    except (data.DataError, DivergedError, CommunicationError) as error:
        raise CannotRunError(f"rank {rank}: {error}") from error
    if records is None:
        return None
    finished = report.assemble(chosen, follower.parameters, conditions, records)
    _publish(finished, outputs, console)
    return finished


def _shape_if_possible(chosen: TrainSettings) -> report.Conditions:
    if chosen.bandwidth is None:
        return report.Conditions(shaped=False, modelled=False, note="loopback, no limit asked for")
    reason = network.why_not_shaped()
    if reason is None:
        return report.Conditions(shaped=True, modelled=False)
    return report.Conditions(shaped=False, modelled=True, note=reason)


class _Follower:
    """Tells the user what will happen and what happens."""

    def __init__(
        self, chosen: TrainSettings, console: Console, conditions: report.Conditions
    ) -> None:
        self.parameters = 0
        self.display: Display | None = None
        self._settings = chosen
        self._console = console
        self._conditions = conditions
        self._speeds: list[dict[str, Any]] = []
        self._written: dict[str, list[int]] = {}
        self._expected = 1 if worker.is_under_torchrun() else chosen.workers

    def announce(self) -> None:
        chosen = self._settings
        bandwidth = format_bandwidth(chosen.bandwidth)
        links = {
            (True, False): f"{bandwidth} each way, every worker behind a link of its own",
            (False, True): f"NOT SHAPED; times for {bandwidth} will be modelled",
            (False, False): self._conditions.note,
        }[self._conditions.shaped, self._conditions.modelled]
        if self._conditions.modelled:
            self._print(
                f"WARNING: the links cannot be limited to {bandwidth}: {self._conditions.note}.\n"
                "The workers will talk over loopback, and the report will hold MODELLED times.",
                style="bold red",
            )
        rate = chosen.learning_rate * chosen.workers
        self._print(
            f"training   {chosen.model} on {chosen.data}, {chosen.steps} steps of "
            f"{chosen.workers} workers x {chosen.batch} images, seed {chosen.seed}\n"
            f"optimizer  SGD, momentum {settings.MOMENTUM}, weight decay {settings.WEIGHT_DECAY}, "
            f"learning rate {rate:g} to {rate / 100:g} (cosine)\n"
            f"device     {chosen.device}\n"
            f"links      {links}\n"
            f"exchange   {_exchange_text(chosen)}\n"
            f"codecs     {', '.join(chosen.codecs)}, one after the other"
        )

    def follow(self, rank: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self._speeds.append(event)
            if len(self._speeds) == self._expected:
                self._print_estimate()
        elif kind == "stderr":
            self._written.setdefault(event["line"], []).append(rank)
        elif rank == 0 and self.display is not None:
            self.display.show(event)

    def show_written(self) -> None:
        """What workers wrote on stderr, such as warnings; the same line of several ranks once."""
        for line, ranks in self._written.items():
            who = self._settings.names(sorted(set(ranks)))
            self._print(f"{who}: {line}", style="dim")

    def _print_estimate(self) -> None:
        self.parameters = self._speeds[0]["parameters"]
        chosen = self._settings
        if not self._conditions.shaped:
            chosen = replace(chosen, bandwidth=None)
        estimates = estimate_seconds(
            chosen,
            self.parameters,
            max(speed["step_seconds"] for speed in self._speeds),
            min(speed["evaluation_seconds"] for speed in self._speeds),
        )
        parts = ", ".join(f"{codec} {_duration(seconds)}" for codec, seconds in estimates.items())
        self._print(
            f"parameters {self.parameters:,}\n"
            f"estimate   {_duration(sum(estimates.values()))} ({parts})"
        )

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _exchange_text(chosen: TrainSettings) -> str:
    if chosen.exchange == settings.SERVER:
        backup = f", {chosen.backup_workers} backup workers" if chosen.backup_workers else ""
        return f"{chosen.exchange}, every step, servers: {chosen.servers}{backup}"
    often = "every step" if chosen.every == 1 else f"every {chosen.every} steps, local ones between"
    return f"{chosen.exchange}, {often}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _publish(finished: report.Report, outputs: Outputs, console: Console) -> None:
    lines = report.footnotes(finished)
    if outputs.json is not None:
        text = json.dumps(finished.to_json(_describe()), indent=2, allow_nan=False)
        if outputs.json == "-":
            print(text)
        else:
            Path(outputs.json).write_text(text + "\n", encoding="utf-8")
            lines.append(f"wrote {outputs.json}")
    if outputs.plots is not None:
        from gradwire.train import plots

        lines += [f"wrote {path}" for path in plots.write(finished, outputs.plots)]
    console.print(report.table(finished))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _describe() -> dict[str, Any]:
    from importlib.metadata import version

    from gradwire.machine import describe_build, describe_machine

    return {**describe_machine(), "gradwire": describe_build(), "torch": version("torch")}
