"""The folder of results: what is there is not repeated, and has the same settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.train import report
from gradwire.train.errors import TrainError
from gradwire.train.records import Evaluation, RankRecord
from gradwire.train.report import Conditions, Report
from gradwire.train.results import Results
from gradwire.train.settings import Run, TrainSettings

SETTINGS = TrainSettings(codecs=("raw/int8", "3lc:s=1.5"), workers=1, steps=2, seeds=2, seed=4)
LINKS = Conditions(shaped=False, modelled=False)


def made(run: Run) -> Report:
    record = RankRecord(run.codec, 0, 1.5, [2.0, 1.0], seed=run.seed)
    record.evaluations = [Evaluation(2, 1.5, 0.5)]
    chosen = SETTINGS.of_run(run)
    return Report(chosen, 10, "data", LINKS, [report.result_of(chosen, 10, LINKS, [record])])


def test_results_are_found_again(tmp_path: Path) -> None:
    run, other = SETTINGS.runs()[:2]
    Results(tmp_path, SETTINGS).add(made(run), {"cpu": "x"})
    assert [path.name for path in tmp_path.iterdir()] == ["raw_int8-4.json"]
    later = replace(SETTINGS, codecs=("raw/int8", "bf16"), seeds=5, threads=7)
    found = Results(tmp_path, later).found()
    assert list(found) == [run]
    assert found[run] == made(run).results[0]
    assert other not in found


def test_without_a_folder_nothing_is_kept() -> None:
    results = Results(None, SETTINGS)
    results.add(made(SETTINGS.runs()[0]), {})
    assert results.found() == {}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    Results(tmp_path, SETTINGS).add(made(SETTINGS.runs()[0]), {})
    said = r"raw_int8-4\.json holds a run with other settings: steps 2 instead of 8, clip 0.0 inst"
    with pytest.raises(TrainError, match=said):
        Results(tmp_path, replace(SETTINGS, steps=8, clip=1.0))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": []}', '{"results": [{}]}'])
def test_another_file_in_a_results_place_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "raw_int8-4.json").write_text(content)
    with pytest.raises(TrainError, match=r"raw_int8-4\.json is no result of gradwire train"):
        Results(tmp_path, SETTINGS)


def test_a_codec_whose_file_name_is_taken(tmp_path: Path) -> None:
    Results(tmp_path, SETTINGS).add(made(SETTINGS.runs()[0]), {})
    document = json.loads((tmp_path / "raw_int8-4.json").read_text())
    document["settings"]["codecs"] = ["raw:int8"]
    (tmp_path / "raw_int8-4.json").write_text(json.dumps(document))
    with pytest.raises(TrainError, match="codecs"):
        Results(tmp_path, SETTINGS)
