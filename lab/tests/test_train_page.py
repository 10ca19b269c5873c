"""The web page of reports: one file, the JSON's numbers, and plain errors before the training."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_runner import run as run_command
from gradwire_lab.train import page, report
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.page import draw
from gradwire_lab.train.page.figure import line, log_axis
from gradwire_lab.train.records import RankRecord, StepCosts
from gradwire_lab.train.report import Report
from gradwire_lab.train.report_table import verdict
from test_train_report import MODELLED, PARAMETERS, SETTINGS, SHAPED, assemble, records, seeds

STEP_SECONDS = (0.25, 0.5, 0.75, 2.0)  # when the steps end
LAYER = {"name": "<fc>.weight", "numel": 900, "values_pushed": 450, "push_payload_bytes": 450}
LAYERS = [LAYER | {"values_pulled": 450, "pull_payload_bytes": 225}]
COUNTED = {"push_bytes": 8000, "pull_bytes": 8000, "control_bytes": 0}
RAW = [{"name": "fc.bias", "numel": 100, "reason": "fewer than two dimensions"}]


def timed(record: RankRecord) -> RankRecord:
    """The record with times of its steps, and with counters of its layers."""
    record.step_ends = [second * record.seconds / 2 for second in STEP_SECONDS]
    record.wire_seconds = [0.1, 0.1, 0.1, 0.4]
    record.own_seconds = [0.05] * 4
    assert record.hook is not None
    record.hook |= {"encode_seconds": 0.1, "decode_seconds": 0.05, "own_seconds": 0.2}
    record.hook |= {"tensors": LAYERS, "raw_tensors": RAW}
    return record


def made() -> Report:
    raw, small = records()
    return assemble(SETTINGS, PARAMETERS, SHAPED, [raw, [timed(record) for record in small]])


def written(tmp_path: Path, shown: Report) -> str:
    pytest.importorskip("plotly")
    path = tmp_path / "run.html"
    page.write([shown], [{"cpu": "a <fast> one"}], path)
    return path.read_text(encoding="utf-8")


def without_library(text: str) -> str:
    return re.sub(r'<script id="plotly">.*?</script>', "", text, flags=re.DOTALL)


def figures_in(text: str) -> list[dict[str, Any]]:
    (found,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
    figures: list[dict[str, Any]] = json.loads(found)
    return figures


def test_the_file_takes_nothing_from_outside(tmp_path: Path) -> None:
    text = written(tmp_path, made())
    own = without_library(text)
    assert len(text) - len(own) > 500_000
    assert not re.search(r"https?:|//\w+\.|\bsrc=|<link|@import|url\(", own)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', own)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_the_numbers_are_those_of_the_json(tmp_path: Path) -> None:
    shown = made()
    document = json.loads(json.dumps(shown.to_json({})))
    metric, loss, frontier, push, pull, time, steps, *_ = figures_in(written(tmp_path, shown))
    assert frontier["layout"]["xaxis"]["type"] == "log"
    for index, result in enumerate(document["results"]):
        assert metric["traces"][index]["x"] == [e["seconds"] for e in result["evaluations"]]
        values = [100 * e["value"] for e in result["evaluations"]]
        assert metric["traces"][index]["y"] == pytest.approx(values)
        assert loss["traces"][index]["y"] == result["loss"]
        assert push["traces"][index]["y"] == result["push_bits"]
        assert pull["traces"][index]["y"] == result["pull_bits"]
    own = document["results"][1]
    assert own["step_ends"] == list(STEP_SECONDS)
    whole = steps["traces"][0]["y"]
    assert whole == pytest.approx([250.0, 250.0, 250.0, 1250.0])
    assert steps["traces"][1]["y"] == pytest.approx([1e3 * s for s in own["wire_seconds"]])
    parts = {trace["name"]: trace["x"][1] for trace in time["traces"]}
    assert parts["encoding"] == pytest.approx(25.0)
    assert parts["gradwire's other work"] == pytest.approx(12.5)
    assert parts["the whole step"] == pytest.approx(1e3 * own["seconds"] / 4)
    bars = [parts[name] for name in list(parts)[:-1]]
    assert sum(bars) == pytest.approx(parts["the whole step"])


def test_the_page_begins_with_a_verdict(tmp_path: Path) -> None:
    shown = made()
    said = (
        "3lc came to 74.50% first, after 2.0 s, 4.0 times as fast as raw (8.0 s); it ended with "
        "75.00%, raw with 75.00%."
    )
    text = without_library(written(tmp_path, shown))
    assert text.index(said) < text.index("<table>")
    modelled = replace(shown, conditions=MODELLED)
    assert "after 2.0 s (modelled times), 4.0" in verdict(modelled)
    swapped = replace(shown, results=shown.results[::-1])
    assert verdict(swapped).startswith(
        "3lc came to 74.50% first, after 2.0 s, so compression did not pay here; next came raw, "
        "after 8.0 s. 3lc ended with 75.00%."
    )
    unreached = replace(shown, settings=replace(shown.settings, until=0.9))
    assert verdict(unreached) == "None came to 90.00%; raw ended with 75.00%."
    alone = replace(shown, results=shown.results[:1])
    assert verdict(alone) == ""
    assert "verdict" not in without_library(written(tmp_path, alone)).partition("</style>")[2]


def test_no_run_that_diverged_is_called_the_first() -> None:
    raw, small = made().results
    lost = replace(small, final=None, diverged=4)
    assert verdict(replace(made(), results=[raw, lost])).startswith("raw came to 74.50% first")
    assert verdict(replace(made(), results=[replace(raw, final=None, diverged=4), small])) == ""
    slow = replace(raw, evaluations=[])
    until = replace(made().settings, until=0.7)
    made_up = replace(made(), settings=until, results=[slow, small])
    assert "where raw did not come; it ended with 75.00%" in verdict(made_up)


def test_layers_with_their_bits_and_what_went_raw(tmp_path: Path) -> None:
    text = written(tmp_path, made())
    names = ["<fc>.weight", "fc.bias"]
    (layers,) = [f for f in figures_in(text) if f["traces"][0].get("y") == names]
    assert [trace["x"] for trace in layers["traces"]] == [[8.0, None], [4.0, None]]
    assert [trace["text"] for trace in layers["traces"]] == [["", "raw"]] * 2
    assert "1 went raw, 10.00% of the values: fc.bias (fewer than two dimensions)" in text
    assert "<fc>" not in text
    assert "&lt;fc&gt;.weight" in text
    assert "a &lt;fast&gt; one" in text


def test_each_picture_has_a_text_and_its_numbers(tmp_path: Path) -> None:
    shown = made()
    text = without_library(written(tmp_path, shown))
    drawn = draw(shown)
    assert len(drawn) == len({figure.title for figure in drawn}) == 9
    for figure in drawn:
        assert len(figure.text) > 40, figure.title
        assert figure.rows, figure.title
        assert all(len(row) == len(figure.columns) for row in figure.rows), figure.title
    assert text.count("<figcaption>") == text.count('role="img"') == len(drawn)


def test_modelled_times_are_marked() -> None:
    raw, small = records()
    shown = assemble(SETTINGS, PARAMETERS, MODELLED, [raw, [timed(record) for record in small]])
    figures = {figure.title: figure for figure in draw(shown)}
    time = figures["Where the time of a step went"]
    assert "modelled" in time.text
    wait = next(trace for trace in time.traces if trace["name"] == "waiting for messages")
    result = shown.results[1]
    modelled = result.seconds - result.measured_seconds + 0.625  # the mean of both ranks' waits
    assert wait["x"][1] == pytest.approx(250 * modelled)
    assert "Use of the links" in figures
    assert "shapes" not in figures["Use of the links"].layout
    assert figures["Test accuracy over time"].layout["xaxis"]["title"]["text"].count("modelled")


def test_a_rival_has_a_bar_that_is_not_divided() -> None:
    rival, small = records()
    rival = [replace(r, codec="torch:bf16", hook={"computed": True} | COUNTED) for r in rival]
    settings = replace(SETTINGS, codecs=("torch:bf16", "3lc"))
    shown = assemble(settings, PARAMETERS, SHAPED, [rival, [timed(record) for record in small]])
    (figure,) = [one for one in draw(shown) if one.title == "Where the time of a step went"]
    (bar,) = [trace for trace in figure.traces if trace["name"].startswith("not divided")]
    assert (bar["x"], bar["y"]) == ([2000.0], ["torch:bf16"])
    assert figure.layout["yaxis"]["categoryarray"] == ["torch:bf16", "3lc"]
    assert "torch:bf16: 2000.0 ms, not divided" in figure.text


def test_runs_without_bytes_and_runs_that_diverged_have_a_page(tmp_path: Path) -> None:
    settings = replace(SETTINGS, codecs=("3lc",), seeds=3, model="gpt", data="text")
    text = written(tmp_path, assemble(settings, PARAMETERS, SHAPED, seeds([2.5, None, 2.25])))
    assert "3lc, seed 1: diverged in step 2" in text
    ranks = [replace(r, codec="ddp", hook=None, push_bytes=[], pull_bytes=[]) for r in records()[0]]
    alone = assemble(SETTINGS, PARAMETERS, SHAPED, [ranks])
    assert [figure.title for figure in draw(alone)] == [
        *("Test accuracy over time", "Training loss over steps", "Use of the links")
    ]


def test_long_lines_are_means_of_steps_and_say_so(tmp_path: Path) -> None:
    ranks = records()[1]
    for record in ranks:
        record.losses = [float(i) for i in range(1000)]
        record.push_bytes = record.pull_bytes = [float(i) for i in range(1000)]
        record.wire_seconds = record.own_seconds = [0.001] * 1000
        record.step_ends = [0.01 * (i + 1) for i in range(1000)]
    shown = assemble(replace(SETTINGS, steps=1000), PARAMETERS, SHAPED, [ranks])
    figures = {figure.title: figure for figure in draw(shown)}
    loss, bits = figures["Training loss over time"], figures["Bits a value over steps, push"]
    assert "Each point is the mean of 10 steps." in loss.text
    assert loss.traces[0]["y"] == pytest.approx([10 * i + 4.5 for i in range(100)])
    assert "Each point is the mean of 3 steps." in bits.text
    assert bits.traces[0]["x"][:2] == [3, 6]
    assert bits.traces[0]["x"][-1] == 1000
    text = written(tmp_path, shown)
    assert "Numbers, 1 row of 6<" in text  # of 334 points
    assert text.count("<tr>") < 500


def test_costs_of_a_step_are_noted() -> None:
    record = RankRecord("3lc", 1)
    record.note(1.5, 0.25, StepCosts(10, 20, 0.5), left_out=1)
    record.note(1.5, 0.5, None, left_out=0)
    assert record.step_ends == [0.25, None, 0.5]
    assert (record.push_bytes, record.wire_seconds) == ([10, None], [0.5, None])
    assert record.own_seconds == []


def test_a_result_of_an_earlier_version_has_no_times_of_steps() -> None:
    values = made().to_json({})["results"][1]
    for name in ("step_ends", "wire_seconds", "own_seconds"):
        del values[name]
    result = report.RunResult.read(values)
    assert (result.step_ends, result.wire_seconds, result.own_seconds) == ([], [], [])


# The commands ----------------------------------------------------------------------------------


def test_the_command_writes_the_page_of_a_json_file(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    source, target = tmp_path / "results.json", tmp_path / "run.html"
    source.write_text(json.dumps(made().to_json({"cpu": "x"})))
    done = run_command("report", str(source), "--html", str(target))
    assert done.code == 0, done.err
    assert f"wrote {target}" in done.out
    page.write([made()], [{"cpu": "x"}], tmp_path / "direct.html")
    assert target.read_bytes() == (tmp_path / "direct.html").read_bytes()


def test_runs_of_a_folder_are_one_section_and_begin_with_the_uncompressed_run(
    tmp_path: Path,
) -> None:
    pytest.importorskip("plotly")
    folder = tmp_path / "runs"
    folder.mkdir()
    shown = made()
    for name, result in zip(("b", "a"), shown.results, strict=True):  # 3lc comes first
        alone = replace(shown.settings, codecs=(result.codec,))
        text = json.dumps(replace(shown, settings=alone, results=[result]).to_json({}))
        (folder / f"{name}.json").write_text(text)
    target = tmp_path / "run.html"
    assert run_command("report", str(folder), "--html", str(target)).code == 0
    metric = figures_in(target.read_text())[0]
    assert [trace["name"] for trace in metric["traces"]] == ["raw", "3lc"]


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    source = tmp_path / "results.json"
    source.write_text(json.dumps(made().to_json({}), indent=1)[:-40])
    done = run_command("report", str(source), "--html", str(tmp_path / "run.html"))
    assert done.code == 1
    assert f"{source} is no result of gradwire train, or its end is missing" in done.err
    assert not (tmp_path / "run.html").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("torch")
    missing = tmp_path / "missing" / "run.html"
    done = run_command("train", "--steps", "1", "--report", str(missing))
    assert done.code == 1
    assert done.err == f"gradwire: error: {missing}: there is no folder {missing.parent}\n"
    with pytest.raises(TrainError, match="is a folder; the page needs the name of a file"):
        page.check(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrainError, match=r"plotly not installed; .* `pip install '\./lab\[report"):
        page.check(tmp_path / "run.html")


def test_a_narrow_range_gets_a_linear_axis_with_ticks() -> None:
    wide, narrow = ([line(0, "a", True, [1, 2], bits)] for bits in ([0.1, 4.0], [0.021, 0.024]))
    assert log_axis("bits", wide, "y")["type"] == "log"
    assert "type" not in log_axis("bits", narrow, "y")


def test_names_that_no_encoding_has_are_shown_with_escapes(tmp_path: Path) -> None:
    shown = made()
    for result in shown.results:
        for hook in result.hook_of_rank:
            if hook and hook.get("tensors"):
                hook["tensors"] = [LAYER | {"name": "a\ud800\x1b[2J.weight"}]
    text = without_library(written(tmp_path, shown))
    assert "a\\ud800\\x1b[2J.weight" in text
    assert "\x1b" not in text
