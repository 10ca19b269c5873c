"""The folder of results: what is there is not repeated, and has the same settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_runner import run as run_command
from gradwire_lab.train import report
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import ACCURACY, LOSS
from gradwire_lab.train.records import MetricValue, RankRecord
from gradwire_lab.train.report import Conditions, Report
from gradwire_lab.train.results import Results, Series, Task, read_documents, reports_of, tasks_of
from gradwire_lab.train.settings import Run, TrainSettings

SETTINGS = TrainSettings(codecs=("raw/int8", "3lc:s=1.5"), workers=1, steps=2, seeds=2, seed=4)
LINKS = Conditions(shaped=False, modelled=False)


def kept(
    folder: Path | None,
    settings: TrainSettings = SETTINGS,
    links: Conditions = LINKS,
    data: str = "data",
    init: str = "",
) -> Results:
    return Results(folder, settings, links, data, init)


def made(run: Run) -> Report:
    record = RankRecord(run.codec, 0, 1.5, [2.0, 1.0], seed=run.seed)
    record.evaluations = [MetricValue(2, 1.5, 0.5)]
    chosen = SETTINGS.of_run(run)
    return Report(chosen, 10, "data", LINKS, [report.result_of(chosen, 10, LINKS, [record])])


def test_results_are_found_again(tmp_path: Path) -> None:
    run, other = SETTINGS.runs()[:2]
    kept(tmp_path).add(made(run), {"cpu": "x"})
    assert [path.name for path in tmp_path.iterdir()] == ["raw_int8-4.json"]
    later = replace(SETTINGS, codecs=("raw/int8", "bf16"), seeds=5, data_dir=Path("elsewhere"))
    found = kept(tmp_path, later).found()
    assert list(found) == [run]
    assert found[run] == made(run).results[0]
    assert other not in found


def test_without_a_folder_nothing_is_kept() -> None:
    results = kept(None, SETTINGS)
    results.add(made(SETTINGS.runs()[0]), {})
    assert results.found() == {}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    kept(tmp_path).add(made(SETTINGS.runs()[0]), {})
    said = r"raw_int8-4\.json holds a run with other settings: steps 2 instead of 8, clip 0.0 inst"
    with pytest.raises(TrainError, match=said):
        kept(tmp_path, replace(SETTINGS, steps=8, clip=1.0))


def test_runs_of_another_number_of_threads_are_others(tmp_path: Path) -> None:
    """Their seconds were given as those of this run, and `report` left the first ones out."""
    folders = [fill(tmp_path / "a"), fill(tmp_path / "b", threads=2)]
    with pytest.raises(TrainError, match=r"raw_int8-4\.json .* threads 1 instead of 2; take"):
        kept(folders[0], replace(SETTINGS, threads=2))
    documents = read_documents(folders)
    (task,) = tasks_of(documents)
    assert [one.label for one in task.series] == [
        f"{codec}, threads {count}" for count in (1, 2) for codec in sorted(SETTINGS.codecs)
    ]
    assert len(reports_of(documents)) == 2


def test_runs_over_other_links_are_other_series(tmp_path: Path) -> None:
    folders = [fill(tmp_path / "a"), fill(tmp_path / "b")]
    for path in folders[1].iterdir():
        document = json.loads(path.read_text())
        document["links"]["shaped"] = True
        path.write_text(json.dumps(document))
    (task,) = tasks_of(read_documents(folders))
    assert [one.label for one in task.series] == [
        f"{codec}, links {links}"
        for links in ("as they were", "shaped")
        for codec in sorted(SETTINGS.codecs)
    ]


def test_a_second_result_of_a_run_is_said(tmp_path: Path) -> None:
    folders = [fill(tmp_path / name) for name in "ab"]
    assert run_command("report", *folders, "--json").err == ""
    path = folders[1] / "raw_int8-4.json"
    document = json.loads(path.read_text())
    document["results"][0]["seconds"] = 9.0
    path.write_text(json.dumps(document))
    done = run_command("report", *folders, "--json")
    assert "raw/int8, seed 4: there are several results with the same settings" in done.err
    assert done.json["tasks"][0]["series"][1]["seconds"] == (9.0 + 1.5) / 2


def test_other_links_and_data_are_refused_by_name(tmp_path: Path) -> None:
    kept(tmp_path).add(made(SETTINGS.runs()[0]), {})
    modelled = Conditions(shaped=False, modelled=True, note="no right")
    with pytest.raises(TrainError, match=r"times measured instead of modelled, links .*'no right'"):
        kept(tmp_path, links=modelled)
    with pytest.raises(TrainError, match=r"raw_int8-4\.json .*: data data instead of other data; "):
        kept(tmp_path, data="other data")
    assert kept(tmp_path).found()


def test_other_weights_at_the_beginning_are_refused(tmp_path: Path) -> None:
    run = SETTINGS.runs()[0]
    kept(tmp_path).add(replace(made(run), init_sha256="1234"), {})
    assert kept(tmp_path, init="1234").found()
    with pytest.raises(TrainError, match=r"-4\.json .*: init_sha256 1234 instead of 5678; "):
        kept(tmp_path, init="5678")


def test_runs_that_began_with_other_weights_are_other_series(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, digest in zip(folders, ("1234", "5678"), strict=True):
        folder.mkdir()
        kept(folder).add(replace(made(SETTINGS.runs()[0]), init_sha256=digest), {})
    documents = read_documents(folders)
    (task,) = tasks_of(documents)
    assert [one.label for one in task.series] == [
        f"raw/int8, init_sha256 {digest}" for digest in ("1234", "5678")
    ]
    assert len(reports_of(documents)) == 2


def test_two_commands_do_not_replace_each_others_runs(tmp_path: Path) -> None:
    run = SETTINGS.runs()[0]
    first, second = kept(tmp_path), kept(tmp_path)  # both find nothing
    first.add(made(run), {})
    second.add(made(run), {"cpu": "other"})  # with the same settings
    other = made(run)
    other = replace(other, settings=replace(other.settings, clip=1.0))
    with pytest.raises(TrainError, match=r"raw_int8-4\.json .* clip 0\.0 instead of 1\.0; take"):
        second.add(other, {})
    assert kept(tmp_path).found()[run].final == 0.5


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": []}', '{"results": [{}]}'])
def test_another_file_in_a_results_place_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "raw_int8-4.json").write_text(content)
    with pytest.raises(TrainError, match=r"raw_int8-4\.json is no result of gradwire train"):
        kept(tmp_path)


DAMAGES: dict[str, dict[str, Any]] = {
    "`times` is a whole number, not a text": {"times": 3},
    "`machine` is a whole number, not an object": {"machine": 3},
    "`links` is a list, not an object": {"links": []},
    "`optimizer` of settings is a whole number, not a text": {"settings": {"optimizer": 3}},
    "an item of `codecs` of settings is null, not a text": {"settings": {"codecs": [None]}},
    "an item of `loss` of result 1 is a text, not a number": {"results": {"loss": [1.0, "a"]}},
    "an item of `hook_of_rank` of result 1 is a whole n": {"results": {"hook_of_rank": [None, 3]}},
    "`seconds` of evaluation 1 is missing": {"results": {"evaluations": [{"step": 1, "value": 1}]}},
    "`final` is null, and the run neither diverged nor failed": {"results": {"final": None}},
    "NaN is no JSON": {"results": {"final": float("nan")}},
    "1e999 is too large for a number": {"results": {"final": "1e999"}},
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_result_is_named(tmp_path: Path, said: str) -> None:
    folder = fill(tmp_path / "runs")
    path = folder / "raw_int8-4.json"
    document = json.loads(path.read_text())
    for key, change in DAMAGES[said].items():
        if key == "results":
            document["results"][0] |= change
        else:
            document[key] = document[key] | change if key == "settings" else change
    path.write_text(json.dumps(document).replace('"1e999"', "1e999"))
    for options in ([], ["--json"], ["--html", tmp_path / "page.html"]):
        done = run_command("report", folder, *options)
        assert done.code == 1
        assert f"{path} is no result of gradwire train: " in done.err
        assert said in done.err
        assert not done.out


def test_a_codec_whose_file_name_is_taken(tmp_path: Path) -> None:
    kept(tmp_path).add(made(SETTINGS.runs()[0]), {})
    document = json.loads((tmp_path / "raw_int8-4.json").read_text())
    document["settings"]["codecs"] = ["raw:int8"]
    (tmp_path / "raw_int8-4.json").write_text(json.dumps(document))
    with pytest.raises(TrainError, match="codecs"):
        kept(tmp_path)


def test_a_setting_that_is_newer_than_a_file_has_its_default(tmp_path: Path) -> None:
    kept(tmp_path).add(made(SETTINGS.runs()[0]), {})
    document = json.loads((tmp_path / "raw_int8-4.json").read_text())
    del document["settings"]["staleness"]
    (tmp_path / "raw_int8-4.json").write_text(json.dumps(document))
    assert kept(tmp_path).found()
    (task,) = tasks_of(read_documents([tmp_path]))
    assert [one.label for one in task.series] == ["raw/int8"]


def fill(folder: Path, **change: Any) -> Path:
    """A folder with the runs of SETTINGS, in which some settings are others."""
    folder.mkdir()
    results = kept(folder)
    for run in SETTINGS.runs():
        one = made(run)
        results.add(replace(one, settings=replace(one.settings, **change)), {})
    return folder


def test_tasks_of_several_folders(tmp_path: Path) -> None:
    folders = [fill(tmp_path / "a"), fill(tmp_path / "b", clip=1.0)]
    folders.append(fill(tmp_path / "c", model="gpt", data="text"))
    images, text = tasks_of(read_documents(folders))
    assert [one.label for one in images.series] == [
        f"{codec}, clip {clip}" for clip in (0.0, 1.0) for codec in sorted(SETTINGS.codecs)
    ]
    assert [len(one.runs) for one in images.series] == [2, 2, 2, 2]
    assert (text.model, text.metric.name) == ("gpt", "held_out_loss")
    assert [one.label for one in text.series] == sorted(SETTINGS.codecs)
    one = text.series[0]
    everything = replace(one.runs[0], push_bits_per_value=32.0, pull_bits_per_value=8.0)
    assert [one.bits, replace(one, runs=[everything]).bits] == [None, 20.0]
    compressed = replace(everything, push_payload_bits=0.1, pull_payload_bits=0.3)
    assert replace(one, runs=[compressed]).bits == pytest.approx(0.2)
    with pytest.raises(TrainError, match="holds no result"):
        tasks_of(read_documents([tmp_path]))


def test_tasks_on_other_data_are_not_compared(tmp_path: Path) -> None:
    folders = [fill(tmp_path / "a"), fill(tmp_path / "b")]
    for path in folders[1].iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "another text"}))
    said = "lenet on fashion-mnist can't be compared, because their data differ: another text; data"
    with pytest.raises(TrainError, match=said):
        tasks_of(read_documents(folders))


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = fill(tmp_path / "runs", workers=3)
    for path in folder.glob("raw*-4.json"):  # with bytes
        document = json.loads(path.read_text())
        document["results"][0] |= {"push_bits_per_value": 32.0, "pull_bits_per_value": 8.0}
        document["results"][0] |= {"final": 0.75}
        path.write_text(json.dumps(document))
    shown = run_command("report", str(folder), "--plots", str(tmp_path))
    assert shown.code == 0, shown.err
    assert "lenet on fashion-mnist: test accuracy" in shown.out
    row = next(line.split() for line in shown.out.splitlines() if "raw/int8" in line)
    assert row[1:9] == ["2", "0", "0", "62.50%", "50.00%", "75.00%", "32", "8"]
    assert row[-1] == "1.5"
    assert "seconds: of a run, the mean of those that came to their end; measured" in shown.out
    assert (tmp_path / "frontier-lenet-fashion-mnist.png").stat().st_size > 10_000
    (task,) = run_command("report", str(folder), "--json").json["tasks"]
    assert [one["mean"] for one in task["series"]] == [0.5, 0.625]
    assert [one["seconds"] for one in task["series"]] == [1.5, 1.5]
    modelled = folder / "raw_int8-4.json"
    modelled.write_text(json.dumps(json.loads(modelled.read_text()) | {"times": "modelled"}))
    (task,) = run_command("report", str(folder), "--json").json["tasks"]
    assert task["times"] == "measured and modelled"
    assert "none: no such file or folder" in run_command("report", str(tmp_path / "none")).err


def test_a_series_that_broke_down_does_not_press_the_others_together() -> None:
    plots = pytest.importorskip("gradwire_lab.train.plots", exc_type=ImportError)
    accuracies = [90.0, 89.5, 89.0, 10.0]
    assert plots.worst_shown(accuracies, ACCURACY) == 87.0
    assert plots.worst_shown(accuracies[:3], ACCURACY) == 89.0
    losses = [1.4, 1.5, 1.6, 9.0]
    assert plots.worst_shown(losses, LOSS) == pytest.approx(2.0)


def test_the_number_of_a_series_that_broke_down_hides_no_other_one() -> None:
    plots = pytest.importorskip("gradwire_lab.train.plots", exc_type=ImportError)
    ends = {1.0: 1.98, 1.6: 1.59, 4.0: 1.4, 8.0: 1.41, 16.0: 1.42, 32.0: 1.43, 0.1: 1.44}
    run = made(Run("raw/int8", 4)).results[0]
    series = [
        Series(str(bits), [replace(run, final=end, push_payload_bits=bits, pull_payload_bits=bits)])
        for bits, end in ends.items()
    ]
    figure = plots.draw_frontier(Task("gpt", "text", series))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    places = [axes.transData.transform(text.xy) for text in axes.texts]
    assert len(places) == 2
    assert not any(t.get_window_extent().contains(*place) for t in axes.texts for place in places)
