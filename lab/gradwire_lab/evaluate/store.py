"""The results of an evaluation's runs: a JSON line for each, which outlives interruptions."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import gradwire
from gradwire_lab.evaluate.arms import Arm, Setup
from gradwire_lab.evaluate.found import Observed
from gradwire_lab.json_fields import parse_object, read_fields
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.report import Conditions, RunResult
from gradwire_lab.train.results import settings_of
from gradwire_lab.train.settings import TrainSettings

_KIND = "gradwire-evaluate"
_NAME = re.compile(rb'\{"run": "([^"]+)", ')  # the head of each line
_CURVE_POINTS = 100  # of the means over steps that a line keeps
# Settings on which the end of a training does not depend.
_FREE = {"data_dir", "threads", "eval_every"}


@dataclass(frozen=True)
class ArmRun:
    """One training of an arm."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """The name of its line, which no other run of the task has."""
        return self.arm.name(self.seed)

    @property
    def title(self) -> str:
        return f"{self.arm.task}/{self.name}"


@dataclass(frozen=True)
class Build:
    """A build of gradwire."""

    version: str
    commit: str


@dataclass(frozen=True)
class Machine:
    """Where a run was made."""

    cpu: str
    cores: int
    torch: str
    gradwire: Build


@dataclass(frozen=True)
class Line:
    """What is read of a run's line."""

    kind: str
    metric: str
    settings: dict[str, Any]
    machine: Machine
    links: Conditions
    result: RunResult
    observed: Observed | None = None


class Store:
    """A folder of results, which several processes may fill together: a file of JSON lines for each
    task, to which a run adds its line when it ends."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.folder, self._setup = folder, setup

    def settings(self, run: ArmRun) -> TrainSettings:
        return run.arm.settings(run.seed, self._setup)

    def path(self, run: ArmRun) -> Path:
        return self.folder / f"{run.arm.task}.jsonl"

    def read(self, run: ArmRun) -> Line | None:
        """The line of a run; the last one if there are several. None where there is no line.

        Raises:
            ValueError: The line cannot be used. The message gives the reason.
            TrainError: The file has a line that is of no run.
        """
        text = self._lines(self.path(run)).get(run.name)
        if text is None:
            return None
        try:
            line = read_fields(Line, parse_object(text))
            if run.arm.observed and line.observed is None:
                raise ValueError("`observed` is missing")
        except ValueError as error:
            raise ValueError(f"it is no result of gradwire evaluate: {error}") from error
        if (version := line.machine.gradwire.version) != gradwire.__version__:
            raise ValueError(f"it is of gradwire {version}, this is {gradwire.__version__}")
        if different := self._compare(run, line):
            raise ValueError(f"it has other settings: {', '.join(different)}")
        return line

    @staticmethod
    def _lines(path: Path) -> dict[str, bytes]:
        """The last line of each run of a file. A line without an end is that of a process that died
        while it wrote."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return {}
        lines = {}
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            named = _NAME.match(line)
            if named is None:
                raise TrainError(f"{path}, line {number}, is of no run; remove it")
            lines[named[1].decode()] = line
        return lines

    def _compare(self, run: ArmRun, line: Line) -> list[str]:
        """How the settings and links of a line differ from those of the run."""
        wanted = self.settings(run).to_json() | {"kind": _KIND}
        found = settings_of(vars(line)) | {"kind": line.kind}
        free = _FREE - ({"threads"} if run.arm.timed else set())
        different = [
            f"{key} {found.get(key)!r} instead of {value!r}"
            for key, value in wanted.items()
            if key not in free and found[key] != value
        ]
        if run.arm.timed and not line.links.shaped:
            different.append(f"links that were not shaped ({line.links.note})")
        return different

    def write(self, run: ArmRun, document: dict[str, Any]) -> None:
        """Adds a line. document: the report of `gradwire train` with this run alone."""
        (result,) = document["results"]
        kept = {key: value for key, value in document.items() if key != "results"}
        line = {"run": run.name} | kept | {"kind": _KIND, "result": shorten(result)}
        text = json.dumps(line, allow_nan=False) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path(run).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a line without an end goes
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def claim(self, run: ArmRun) -> Iterator[bool]:
        """Whether the run is this process's until the end of the block. The claim of a process
        that dies is free again."""
        place = self.folder / f".{run.arm.task}-{run.name}.lock"
        with place.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                place.unlink(missing_ok=True)

    @contextmanager
    def quiet(self, timed: bool, on_wait: Callable[[], None]) -> Iterator[None]:
        """Inside, no run of another process is under way if this one is timed, and no timed one
        otherwise. on_wait: called if it has to wait for that."""
        kind = fcntl.LOCK_EX if timed else fcntl.LOCK_SH
        with (self.folder / ".timing.lock").open("w") as lock:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, kind)
            yield


def shorten(result: dict[str, Any]) -> dict[str, Any]:
    """The result with at most _CURVE_POINTS means in the lists of losses and bits over steps, and
    without times of steps and what each rank counted."""
    curves = {name: _means(result[name]) for name in ("loss", "push_bits", "pull_bits")}
    dropped = ("hook_of_rank", "step_ends", "wire_seconds", "own_seconds")
    return result | curves | {name: [] for name in dropped}


def _means(values: Sequence[float]) -> list[float]:
    """Means of equally many consecutive values, to 5 digits."""
    width = -(-len(values) // _CURVE_POINTS) or 1
    cut = [values[i : i + width] for i in range(0, len(values), width)]
    return [float(f"{fmean(part):.5g}") for part in cut]


def curve(values: Sequence[float], steps: int) -> tuple[list[float], list[float]]:
    """Steps and values of a list that `shorten` made of `steps` values."""
    width = steps / len(values) if values else 0.0
    return [width * (i + 0.5) for i in range(len(values))], list(values)
