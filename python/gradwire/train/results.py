"""The folder of a command's results, which outlives an interrupted command: a file for each run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gradwire.train.errors import TrainError
from gradwire.train.report import Report, RunResult
from gradwire.train.settings import Run, TrainSettings

# Settings in which the runs of a folder may differ. The result of a run does not depend on them,
# or its file names them.
_FREE = {"codecs", "seed", "seeds", "data_dir", "threads"}


class Results:
    """The runs that a folder holds. folder: None keeps nothing. Raises TrainError if a file of the
    wanted runs has other settings."""

    def __init__(self, folder: Path | None, settings: TrainSettings) -> None:
        self._folder = folder
        self.documents: dict[Run, dict[str, Any]] = {}
        for run in settings.runs() if folder else []:
            path = self._path(run)
            if path.exists():
                self.documents[run] = _read(path)
                _check_same(path, self.documents[run], settings.of_run(run))

    def found(self) -> dict[Run, RunResult]:
        return {
            run: RunResult.read(document["results"][0]) for run, document in self.documents.items()
        }

    def add(self, report: Report, machine: dict[str, Any]) -> None:
        """Writes the report of a run; the whole file or nothing."""
        if self._folder is None:
            return
        text = json.dumps(report.to_json(machine), indent=1, allow_nan=False)
        path = self._path(Run(report.results[0].codec, report.results[0].seed))
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)

    def _path(self, run: Run) -> Path:
        assert self._folder is not None
        return self._folder / f"{re.sub(r'[^A-Za-z0-9.,=-]+', '_', run.codec)}-{run.seed}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        RunResult.read(document["results"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise TrainError(f"{path} is no result of gradwire train: {error!r}") from error
    return document


def _check_same(path: Path, document: dict[str, Any], wanted: TrainSettings) -> None:
    found, asked = document["settings"], json.loads(json.dumps(wanted.to_json()))
    different = [k for k in asked if k not in _FREE and found.get(k) != asked[k]]
    different += [k for k in ("codecs", "seed") if found.get(k) != asked[k]]
    if different:
        named = ", ".join(f"{k} {found.get(k)} instead of {asked[k]}" for k in different)
        raise TrainError(f"{path} holds a run with other settings: {named}; take another --out")
