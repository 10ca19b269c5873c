"""The folder of a command's results, which outlives an interrupted command: a file for each run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gradwire.files import write_text
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import METRICS, Metric
from gradwire_lab.train.report import Conditions, Report, RunResult, mean_of
from gradwire_lab.train.rivals import PLAIN_DDP
from gradwire_lab.train.settings import Run, TrainSettings

RAW = "raw"  # the codec

# Settings in which the runs of a folder may differ. The result of a run does not depend on them,
# or its file names them.
_FREE = {"codecs", "seed", "seeds", "data_dir", "threads"}


class Results:
    """The runs that a folder holds. folder: None keeps nothing. describe_data: called if the folder
    holds wanted runs. Raises TrainError if a file of such a run has other settings, links or
    data."""

    def __init__(
        self,
        folder: Path | None,
        settings: TrainSettings,
        conditions: Conditions,
        describe_data: Callable[[], str],
    ) -> None:
        self._folder = folder
        paths = {run: self._path(run) for run in settings.runs()} if folder else {}
        self.documents = {run: _read(path) for run, path in paths.items() if path.exists()}
        if not self.documents:
            return
        data = describe_data()
        for run, document in self.documents.items():
            wanted = Report(settings.of_run(run), 0, data, conditions, [])
            _check_same(paths[run], document, wanted)

    def found(self) -> dict[Run, RunResult]:
        return {
            run: RunResult.read(document["results"][0]) for run, document in self.documents.items()
        }

    def add(self, report: Report, machine: dict[str, Any]) -> None:
        """Writes the report of a run; the whole file or nothing."""
        if self._folder is None:
            return
        text = json.dumps(report.to_json(machine), indent=1, allow_nan=False)
        write_text(self._path(Run(report.results[0].codec, report.results[0].seed)), text)

    def _path(self, run: Run) -> Path:
        assert self._folder is not None
        return self._folder / f"{run_name(run.codec, run.seed)}.json"


def run_name(text: str, seed: int) -> str:
    """The name of a run's file or line. text: what distinguishes it from the others there."""
    return f"{re.sub(r'[^A-Za-z0-9.,=-]+', '_', text)}-{seed}"


@dataclass(frozen=True)
class Series:
    """The runs of one way to train a task, with several seeds."""

    label: str
    runs: list[RunResult]

    @property
    def bits(self) -> float | None:
        """Bits of a value, the mean of push and pull, of the compressed tensors alone; of
        everything where a run did not count these apart (rivals). None: unknown."""
        payloads = (lambda run: run.push_payload_bits, lambda run: run.pull_payload_bits)
        everything = (lambda run: run.push_bits_per_value, lambda run: run.pull_bits_per_value)
        for legs in (payloads, everything):
            means = [mean for leg in legs if (mean := mean_of(self.runs, leg)) is not None]
            if len(means) == len(legs):
                return fmean(means)
        return None

    @property
    def finals(self) -> list[float]:
        return [run.final for run in self.runs if run.final is not None]


@dataclass(frozen=True)
class Task:
    """What some runs have in common. times: whether their seconds are measured, or modelled, or
    `measured and modelled`."""

    model: str
    data: str
    series: list[Series]
    times: str = "measured"

    @property
    def metric(self) -> Metric:
        return METRICS[self.data]


def read_documents(places: Sequence[Path]) -> list[dict[str, Any]]:
    """The reports in some files, which `train --json` or `--out` wrote, and in all files of some
    folders. Raises TrainError."""
    documents = []
    for place in places:
        files = [place] if place.is_file() else sorted(place.glob("*.json"))
        if not files:
            raise TrainError(f"{place} holds no result of gradwire train --out: no *.json")
        documents += [_read(file) for file in files]
    return documents


def reports_of(documents: Sequence[dict[str, Any]]) -> list[Report]:
    """A report for all runs with the same settings, links and data; of equal runs the last. A
    report of several documents begins with the uncompressed runs."""
    alike: dict[str, list[Report]] = {}
    for document in documents:
        settings = {k: v for k, v in settings_of(document).items() if k not in _FREE}
        key = json.dumps([settings, document["links"], document["data"]], sort_keys=True)
        alike.setdefault(key, []).append(Report.read(document))
    return [reports[0] if len(reports) == 1 else _merged(reports) for reports in alike.values()]


def _merged(reports: Sequence[Report]) -> Report:
    runs = {(run.codec, run.seed): run for report in reports for run in report.results}
    order = sorted(runs, key=lambda run: run[0] not in (PLAIN_DDP, RAW))
    seeds = sorted({seed for _, seed in order})
    settings = replace(
        reports[0].settings,
        codecs=tuple(dict.fromkeys(codec for codec, _ in order)),
        seed=seeds[0],
        seeds=len(seeds),
    )
    return replace(reports[0], settings=settings, results=[runs[run] for run in order])


def tasks_of(documents: Sequence[dict[str, Any]]) -> list[Task]:
    """The runs of some documents. A series is named by its codec, and by the settings in which the
    runs of its task differ. Raises TrainError if the data of a task differ."""
    tasks = []
    for model, data in dict.fromkeys(_task(document) for document in documents):
        own = [document for document in documents if _task(document) == (model, data)]
        if len(texts := {document["data"] for document in own}) > 1:
            raise TrainError(
                f"the runs of {model} on {data} can't be compared, because their data differ: "
                f"{'; '.join(sorted(texts))}"
            )
        varied = _varied([settings_of(document) for document in own])
        runs: dict[str, dict[int, RunResult]] = {}
        for document in own:
            differing = [f"{key} {settings_of(document)[key]}" for key in varied]
            for result in map(RunResult.read, document["results"]):
                label = ", ".join([result.codec, *differing])
                runs.setdefault(label, {})[result.seed] = result
        series = [Series(label, list(of_label.values())) for label, of_label in runs.items()]
        times = " and ".join(sorted({document["times"] for document in own}))
        tasks.append(Task(model, data, series, times))
    return tasks


def _task(document: dict[str, Any]) -> tuple[str, str]:
    return document["settings"]["model"], document["settings"]["data"]


def _varied(found: list[dict[str, Any]]) -> list[str]:
    return [
        key for key in found[0] if key not in _FREE and any(s[key] != found[0][key] for s in found)
    ]


def settings_of(document: dict[str, Any]) -> dict[str, Any]:
    """Those of a file; settings that are newer than the file have their defaults."""
    known: dict[str, Any] = json.loads(json.dumps(TrainSettings().to_json()))
    return {key: document["settings"].get(key, default) for key, default in known.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if not text.rstrip().endswith("}"):
            raise TrainError(f"{path} is no result of gradwire train, or its end is missing")
        document: dict[str, Any] = json.loads(text)
        Report.read(document), document["results"][0]
        METRICS[document["settings"]["data"]], document["settings"]["model"], document["times"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise TrainError(f"{path} is no result of gradwire train: {error!r}") from error
    return document


def _check_same(path: Path, document: dict[str, Any], wanted: Report) -> None:
    found, asked = settings_of(document), json.loads(json.dumps(wanted.settings.to_json()))
    different = [k for k in asked if k not in _FREE and found[k] != asked[k]]
    different += [k for k in ("codecs", "seed") if found[k] != asked[k]]
    named = [f"{k} {found[k]} instead of {asked[k]}" for k in different]
    for key, value in (("times", wanted.times), ("links", wanted.links), ("data", wanted.data)):
        if document[key] != value:
            named.append(f"{key} {document[key]} instead of {value}")
    if named:
        raise TrainError(
            f"{path} holds a run with other settings: {', '.join(named)}; take another --out"
        )
