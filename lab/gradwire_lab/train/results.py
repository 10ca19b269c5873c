"""The folder of a command's results, which outlives an interrupted command: a file for each run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from gradwire.files import write_text
from gradwire_lab.json_fields import FromJson, parse_object
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import METRICS, Metric
from gradwire_lab.train.report import Conditions, Report, RunResult, mean_of
from gradwire_lab.train.rivals import PLAIN_DDP
from gradwire_lab.train.settings import Run, TrainSettings

RAW = "raw"  # the codec

# Settings in which the runs of a folder may differ. The result of a run does not depend on them,
# or its file names them. (Of threads its seconds depend, and in one process its sums.)
_FREE = {"codecs", "seed", "seeds", "data_dir"}


class Results:
    """The runs that a folder holds. folder: None keeps nothing. Raises TrainError if a file of such
    a run has other settings, links, data or first weights."""

    def __init__(
        self,
        folder: Path | None,
        settings: TrainSettings,
        conditions: Conditions,
        data: str,
        init_sha256: str = "",
    ) -> None:
        self._folder = folder
        paths = {run: self._path(run) for run in settings.runs()} if folder else {}
        self.documents = {run: _read(path) for run, path in paths.items() if path.exists()}
        for run, document in self.documents.items():
            wanted = Report(settings.of_run(run), 0, data, conditions, [], init_sha256)
            _check_same(paths[run], document, wanted)

    def found(self) -> dict[Run, RunResult]:
        return {
            run: RunResult.read(document["results"][0]) for run, document in self.documents.items()
        }

    def add(self, report: Report, machine: dict[str, Any]) -> None:
        """Writes the report of a run; the whole file or nothing. Raises TrainError if another
        command has written one with other settings there meanwhile."""
        if self._folder is None:
            return
        path = self._path(Run(report.results[0].codec, report.results[0].seed))
        if path.exists():
            _check_same(path, _read(path), report)
        write_text(path, json.dumps(report.to_json(machine), indent=1, allow_nan=False))

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
        for name in ("payload_bits", "bits_per_value"):
            push, pull = (
                mean_of(self.runs, attrgetter(f"{leg}_{name}")) for leg in ("push", "pull")
            )
            if push is not None and pull is not None:
                return (push + pull) / 2
        return None

    @property
    def finals(self) -> list[float]:
        return [run.final for run in self.runs if run.final is not None]


@dataclass(frozen=True)
class Task:
    """What some runs have in common. times: whether their seconds are measured, or modelled, or
    `measured and modelled`. replaced: names the runs of which the documents have another, later
    result, which counts."""

    model: str
    data: str
    series: list[Series]
    times: str = "measured"
    replaced: Sequence[str] = ()

    @property
    def metric(self) -> Metric:
        return METRICS[self.data]


def read_documents(places: Sequence[Path]) -> list[dict[str, Any]]:
    """The reports in some files, which `train --json` or `--out` wrote, and in all files of some
    folders. Raises TrainError."""
    documents = []
    for place in places:
        if not place.exists():
            raise TrainError(f"{place}: no such file or folder")
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
        settings = {k: v for k, v in _begins_with(document).items() if k not in _FREE}
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
    tasks: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for document in documents:
        settings = document["settings"]
        tasks.setdefault((settings["model"], settings["data"]), []).append(document)
    return [_task(model, data, own) for (model, data), own in tasks.items()]


def _task(model: str, data: str, documents: list[dict[str, Any]]) -> Task:
    texts = {document["data"] for document in documents}
    if len(texts) > 1:
        raise TrainError(
            f"the runs of {model} on {data} can't be compared, because their data differ: "
            f"{'; '.join(sorted(texts))}"
        )
    found = [_begins_with(document) for document in documents]
    varied = [k for k, v in found[0].items() if k not in _FREE and any(s[k] != v for s in found)]
    runs: dict[str, dict[int, RunResult]] = {}
    replaced = []
    for document, settings in zip(documents, found, strict=True):
        for result in map(RunResult.read, document["results"]):
            label = ", ".join([result.codec, *(f"{key} {settings[key]}" for key in varied)])
            of_label = runs.setdefault(label, {})
            if of_label.get(result.seed, result) != result:
                replaced.append(f"{label}, seed {result.seed}")
            of_label[result.seed] = result
    series = [Series(label, list(of_label.values())) for label, of_label in runs.items()]
    times = " and ".join(sorted({document["times"] for document in documents}))
    return Task(model, data, series, times, replaced)


def settings_of(document: dict[str, Any]) -> dict[str, Any]:
    """Those of a file; settings that are newer than the file have their defaults."""
    return TrainSettings.read(document["settings"]).to_json()


def _begins_with(document: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file, the digest of the weights that they name, and its links."""
    links = "shaped" if document["links"]["shaped"] else "as they were"
    digest = document.get("init_sha256", "")
    return settings_of(document) | {"init_sha256": digest, "links": links}


@dataclass(frozen=True)
class _Surroundings(FromJson):
    """What a file has beside the report."""

    machine: dict[str, Any]
    links: dict[str, Any]
    times: str


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
        if not text.rstrip().endswith(b"}"):
            raise TrainError(f"{path} is no result of gradwire train, or its end is missing")
        document = parse_object(text)
        _Surroundings.read(document)
        Report.read(document), document["results"][0]
        METRICS[document["settings"]["data"]], document["settings"]["model"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise TrainError(f"{path} is no result of gradwire train: {error!r}") from error
    return document


def _check_same(path: Path, document: dict[str, Any], wanted: Report) -> None:
    found, asked = settings_of(document), wanted.settings.to_json()
    compared = [k for k in asked if k not in _FREE] + ["codecs", "seed"]
    pairs = [(k, found[k], asked[k]) for k in compared]
    pairs += [(k, document[k], getattr(wanted, k)) for k in ("times", "links", "data")]
    pairs.append(("init_sha256", document.get("init_sha256", ""), wanted.init_sha256))
    named = [f"{key} {one} instead of {other}" for key, one, other in pairs if one != other]
    if named:
        raise TrainError(
            f"{path} holds a run with other settings: {', '.join(named)}; take another --out"
        )
