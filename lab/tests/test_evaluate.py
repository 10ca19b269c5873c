"""`gradwire evaluate`: its trainings, its folder of results, its pages."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import gradwire
from cli_runner import run as run_command
from gradwire_lab.cli.evaluate import _EVALUATIONS
from gradwire_lab.evaluate import diloco, frontier, page, quotes, runner, sz
from gradwire_lab.evaluate.arms import Arm, Setup, arm
from gradwire_lab.evaluate.found import Found, Observed
from gradwire_lab.evaluate.store import ArmRun, Store, curve, shorten
from gradwire_lab.train import network
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import METRICS
from gradwire_lab.train.records import MetricValue, RankRecord
from gradwire_lab.train.report import Conditions, Report, RunResult, result_of
from gradwire_lab.train.settings import TrainSettings

TINY = Setup(scale=0.0005)
MLP = arm("mlp", "raw", seeds=2)
MACHINE = {
    "cpu": "x",
    "cores": 2,
    "torch": "2",
    "gradwire": {"version": gradwire.__version__, "commit": "0123456789"},
}


SEEN: dict[str, Any] = {
    "density": [[0.5], [0.25]],
    "error": [[0.5], [0.1]],
    "bits": [[8.0], [8.0]],
    "seconds": [[0.01], [0.02]],
    "class_shares": [[{"0": 0.75, "8": 0.25, "16": 0.0, "32": 0.0}]] * 2,
}
OBSERVED = Observed(
    steps=[1, 2],
    tensors=[("fc.weight", 100)],
    codecs={},
    histograms={"fc.weight": {"edges": [-1.0, 0.0, 1.0], "gradient": [0.5, 0.5]}},
)


def made(run: ArmRun, setup: Setup = TINY, value: float = 0.5) -> dict[str, Any]:
    """The document of a run that was not trained."""
    settings = run.arm.settings(run.seed, setup)
    record = RankRecord(run.arm.codec, 0, 2.0, [2.0, 1.0], seed=run.seed)
    record.evaluations = [MetricValue(settings.steps, 2.0, value)]
    sent = 4.0 if "s=1.75" in run.arm.codec else 8.0
    counted = dict.fromkeys(("push_bytes", "pull_bytes", "control_bytes"), sent)
    counted |= {"compressed_bits_push": sent / 2, "compressed_bits_pull": 2.0, "steps": 2}
    record.hook = counted
    record.push_bytes, record.pull_bytes = [8.0, 8.0], [4.0, 4.0]
    links = Conditions(shaped=False, modelled=False)
    ranks = [replace(record, rank=rank) for rank in range(settings.ranks)]
    result = result_of(settings, 10, links, ranks)
    return Report(settings, 10, "data", links, [result]).to_json(MACHINE)


def stored(folder: Path, run: ArmRun) -> Store:
    store = Store(folder, TINY)
    store.write(run, made(run))
    return store


def changed(text: str, **fields: object) -> str:
    return json.dumps(json.loads(text) | fields) + "\n"


@pytest.mark.parametrize("name", _EVALUATIONS)
def test_every_training_has_settings_and_a_place_of_its_own(name: str) -> None:
    arms = _EVALUATIONS[name].arms()
    assert len({ArmRun(one, 0).title for one in arms}) == len(arms)
    for one in arms:
        assert one.settings(0, Setup(device="cuda")).device == ("cpu" if one.timed else "cuda")
        whole, part = one.settings(0, Setup()), one.settings(1, TINY)
        assert 0 < part.steps <= whole.steps * TINY.scale + whole.every
        assert part.seed == 1


def test_trainings_that_several_evaluations_need_are_shared() -> None:
    owners = [set(evaluation.arms()) for evaluation in _EVALUATIONS.values()]
    raw = arm("resnet8", "raw")
    assert sum(raw in arms for arms in owners) > 2
    both = [one for arms in owners for one in arms if one == raw]
    assert {ArmRun(one, 0).title for one in both} == {ArmRun(raw, 0).title}


@pytest.mark.parametrize("task", ["gpt", "lstm"])
def test_every_codec_of_local_steps_has_its_base(task: str) -> None:
    _, *arms = frontier._TASKS[task].arms.values()  # the first is DDP
    bases = {frontier._base_of(one) for one in arms}
    assert bases <= set(arms)
    assert all(base.settings(0, Setup()).takes_local_steps for base in bases)


def test_the_larger_resnets_train_as_long_as_in_the_paper() -> None:
    one = arm("resnet8", "raw").settings(0, Setup(resnet="resnet110"))
    assert (one.model, one.steps, one.workers) == ("resnet110", 25600, 10)
    timed = arm("resnet8", "raw", timed=True, steps=12).settings(0, Setup(resnet="resnet110"))
    assert timed.steps == 12


def test_a_result_is_found_again_without_its_long_lists(tmp_path: Path) -> None:
    run = ArmRun(MLP, 1)
    store = stored(tmp_path, run)
    found, lines, unusable = runner.read([MLP], store)
    assert found.finals(MLP) == [0.5]
    assert found.bits(MLP) == "4, 2"
    assert [line.settings["seed"] for line in lines] == [1]
    assert unusable == []
    result = shorten({**made(run)["results"][0], "loss": [float(k) for k in range(1000)]})
    assert result["loss"][:2] == [4.5, 14.5]
    assert curve(result["loss"], 1000)[0][:2] == [5.0, 15.0]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda text: text[:-40] + "\n", "it is cut off or no JSON"),
        (
            lambda text: text.replace('"kind": "gradwire-evaluate"', '"kind": "x"'),
            "kind 'x' instead of",
        ),
        (lambda text: text.replace(gradwire.__version__, "0.0.9"), "it is of gradwire 0.0.9"),
        (lambda text: text.replace('"clip": 0.0', '"clip": 2.0'), "clip 2.0 instead of 0.0"),
        (lambda text: changed(text, settings=[]), "`settings` is a list, not an object"),
        (lambda text: changed(text, links={}), "`shaped` of links is missing"),
        (lambda text: text.replace('"result"', '"results"'), "`result` is missing"),
        (lambda text: text.replace('"seconds"', '"time"'), "`seconds` of result is missing"),
        (
            lambda text: text.replace('"final": 0.5', '"final": "y"'),
            "`final` of result is a text, not a number or null",
        ),
        (lambda text: text.replace('"link": null', '"link": {}'), "`sent` of link is missing"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_its_run_is_made_again(
    tmp_path: Path, spoil: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ArmRun(MLP, 0)
    store = stored(tmp_path, run)
    path = store.path(run)
    spoilt = spoil(path.read_text())
    path.write_text(spoilt)
    with pytest.raises(ValueError, match=why):
        store.read(run)
    assert why in runner.read([MLP], store)[2][0]
    assert path.read_text() == spoilt, "reading leaves it"
    assert not runner._is_there(run, store, Console())
    said = capsys.readouterr().out
    assert said.startswith(f"{path}, raw-0 cannot be used (")
    assert why in said
    assert said.endswith("; it stays, and the run is made again\n")
    store.write(run, made(run))
    assert store.read(run) is not None, "the last line of a run counts"
    assert path.read_text().startswith(spoilt)


def test_a_process_that_dies_while_it_writes_leaves_the_other_runs(tmp_path: Path) -> None:
    first, second = ArmRun(MLP, 0), ArmRun(MLP, 1)
    store = stored(tmp_path, first)
    whole = store.path(first).read_bytes()
    for end in (1, 30, len(whole) - 1):
        store.path(first).write_bytes(whole + whole[:end].replace(b"raw-0", b"raw-1"))
        assert store.read(first) is not None
        assert store.read(second) is None
        store.write(second, made(second))
        assert store.read(second) is not None
        assert len(store.path(first).read_bytes().splitlines()) == 2


def test_a_line_of_no_run_is_said(tmp_path: Path) -> None:
    store = stored(tmp_path, ArmRun(MLP, 0))
    with store.path(ArmRun(MLP, 0)).open("a") as file:
        file.write("<<<<<<< HEAD\n")
    with pytest.raises(TrainError, match=r"mlp.jsonl, line 2, is of no run; remove it"):
        runner.read([MLP], store)


def test_a_setting_that_is_newer_than_a_file_has_its_default(tmp_path: Path) -> None:
    run = ArmRun(MLP, 0)
    store = stored(tmp_path, run)
    document = json.loads(store.path(run).read_text())
    del document["settings"]["barrier"]
    store.path(run).write_text(json.dumps(document) + "\n")
    assert store.read(run) is not None


def test_two_calls_share_the_work(tmp_path: Path) -> None:
    arms = [MLP, arm("mlp", "bf16")]
    stores = [Store(tmp_path, TINY) for _ in range(2)]
    failed: list[int] = []

    def work(store: Store) -> None:
        failed.append(runner.make(arms, store, Console(quiet=True)))

    calls = [threading.Thread(target=work, args=(store,)) for store in stores]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert failed == [0, 0]
    lines = (tmp_path / "mlp.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["run"] for line in lines) == ["bf16-0", "raw-0", "raw-1"]
    with stores[0].claim(ArmRun(MLP, 0)) as mine, stores[1].claim(ArmRun(MLP, 0)) as others:
        assert mine
        assert not others


def test_a_run_that_did_not_end_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = made(ArmRun(MLP, 0))
    result = RunResult.read(document["results"][0])
    settings = {MLP: MLP.settings(0, TINY)}
    monkeypatch.setattr(runner, "_train_or_observe", lambda *_: document)
    for failed, said in (("", "diverged"), ("no budget", "stopped")):
        change: dict[str, Any] = {"final": None, "failed": failed}
        change |= {"diverged": None if failed else 1}
        ended = replace(result, **change)
        assert Found({MLP: {0: ended}}, settings).text(MLP) == said
        assert Found({MLP: {0: ended, 1: result}}, settings).text(MLP) == f"1 of 2 {said}"
        document["results"][0] |= change
        runner.make([replace(MLP, seeds=1)], Store(tmp_path / said, TINY), Console())
        assert re.search(rf"mlp/raw-0: {said} after \d+ s; 0 runs left", capsys.readouterr().out)


def test_a_timed_run_is_alone(tmp_path: Path) -> None:
    order: list[str] = []
    store = Store(tmp_path, TINY)
    with store.quiet(False, order.clear):
        waiting = threading.Thread(target=lambda: _note(store, order))
        waiting.start()
        waiting.join(0.2)
        order.append("untimed")
    waiting.join()
    assert order == ["waits", "untimed", "timed"]


def _note(store: Store, order: list[str]) -> None:
    with store.quiet(True, lambda: order.append("waits")):
        order.append("timed")


def test_a_timed_run_needs_shaped_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = arm("mlp", "raw", timed=True, exchange="ring", bandwidth="100mbit", steps=2)
    run, store = ArmRun(one, 0), Store(tmp_path, Setup())
    monkeypatch.setattr(network, "why_not_shaped", lambda: "no links today")
    assert runner.make([one], store, Console()) == 1
    assert "no links today" in capsys.readouterr().out
    store.write(run, made(run, Setup()))
    with pytest.raises(ValueError, match="links that were not shaped"):
        store.read(run)


def test_missing_data_are_said_before_the_start(tmp_path: Path) -> None:
    done = run_command("evaluate", "qsgd", "--data-dir", tmp_path / "none", "--out", tmp_path / "o")
    assert done.code != 0
    assert "none" in done.err
    assert not list(tmp_path.glob("o/runs/*"))


@pytest.mark.long
def test_a_run_that_cannot_be_made_is_said_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = arm("mlp", "raw", data_dir=tmp_path / "nowhere")
    store = Store(tmp_path / "runs", TINY)
    assert runner.make([broken, MLP], store, Console()) == 1
    assert "nowhere" in capsys.readouterr().out
    assert store.read(ArmRun(MLP, 1)) is not None


@pytest.mark.parametrize("name", _EVALUATIONS)
def test_the_page_shows_every_result(tmp_path: Path, name: str) -> None:
    evaluation = _EVALUATIONS[name]
    arms, setup = evaluation.arms(), Setup()
    results: dict[Arm, dict[int, RunResult]] = {}
    for index, run in enumerate(runner.runs_of(arms)):
        document = made(run, setup, 0.75 + index / 1000)
        results.setdefault(run.arm, {})[run.seed] = RunResult.read(document["results"][0])
    watched = {one: replace(OBSERVED, codecs=dict.fromkeys(one.observed, SEEN)) for one in arms}
    found = Found(results, {one: one.settings(0, setup) for one in arms}, watched)
    written = page.write(evaluation, found, "machines", "the command", tmp_path / f"{name}.md")
    text = written[0].read_text()
    assert "not run" not in text
    assert "are there.**" not in text
    shown = sum(found.text(one) in text for one in arms)
    assert shown >= 10, "the others are timed, or points of a picture"
    pictures = [picture for e in evaluation.experiments for picture in e.figures]
    assert len(written) == 1 + len(pictures)
    assert all(path.stat().st_size > 5000 for path in written[1:])


def test_the_page_says_what_is_missing(tmp_path: Path) -> None:
    stored(tmp_path / "runs", ArmRun(arm("gpt", "raw"), 0))  # of another page
    done = run_command("evaluate", "qsgd", "--draw-only", "--out", tmp_path, "--json")
    page_of = str(tmp_path / "qsgd.md")
    empty = {"name": "qsgd", "page": page_of, "runs": []}
    assert done.json == {"evaluations": [empty], "failed": 0}
    text = (tmp_path / "qsgd.md").read_text()
    assert "No run is there yet." in text
    assert ", none are there" in text
    assert "What agrees" not in text


def test_the_page_quotes_what_people_wrote_about_it(tmp_path: Path) -> None:
    stored(tmp_path / "runs", ArmRun(arm("gpt", "raw"), 0))
    (tmp_path / "qsgd").mkdir()
    cell = "{Table 1 and figure 3: lstm; 32 bit; held-out loss}"
    quoting = f"- **Bits**: four are enough. They end at {cell}.\n"
    (tmp_path / "qsgd" / page.FINDINGS).write_text(quoting)
    (tmp_path / "qsgd" / page.REFEREE).write_text("The models are small.\n")
    run_command("evaluate", "qsgd", "--draw-only", "--out", tmp_path)
    text = (tmp_path / "qsgd.md").read_text()
    head = "## What was found"
    assert f"No run is there yet.\n\n{head}\n\n- **Bits**: four are enough.\n\n## Table 1" in text
    assert "## What a referee would still say\n\nThe models are small.\n\n```" in text


def test_a_quote_is_a_cell_of_a_table() -> None:
    tables = {
        "Table 1: all": "| a | b | c |\n| --- | ---: | ---: |\n| x y | 1 ± 2 |  |\n\n"
        "| a | c | b |\n| --- | ---: | ---: |\n| z | 3 | 4 |",
        "Table 2": "",
    }
    text = (
        "- **One**: {Table 1; x y; b}, and\n  {Table 1: all; z;\n  b}. Not {Table 2; x; y}.\n"
        "- Neither {Table 1; x y; c}.\n\n"
        "| t |\nend"
    )
    filled = "- **One**: 1 ± 2, and 4.\n\n| t |\nend"
    assert quotes.fill(text, tables, 28) == filled
    for wrong in ("{Table; x y; b}", "{Table 1; w; b}", "{Table 1; z; d}", "{Figure; z; d}"):
        with pytest.raises(ValueError, match=r"called|no table has a row"):
            quotes.fill(wrong, tables, 100)


def test_several_seeds_have_an_interval() -> None:
    runs = {seed: made(ArmRun(MLP, seed), value=value) for seed, value in ((0, 0.5), (1, 0.51))}
    results = {seed: RunResult.read(document["results"][0]) for seed, document in runs.items()}
    other = arm("mlp", "int8")
    found = Found(
        {MLP: results, other: results}, {one: MLP.settings(0, TINY) for one in (MLP, other)}
    )
    assert found.text(MLP) == "50.50% ± 6.35", "12.706 times 0.5 points"
    assert found.difference(other, MLP) == "+0.00 ± 0.00"


def test_a_speed_up_is_of_equal_seeds_that_came_to_their_end() -> None:
    def run(one: Arm, seed: int, seconds: float, **fields: Any) -> RunResult:
        found = RunResult.read(made(ArmRun(one, seed))["results"][0])
        return replace(found, measured_seconds=seconds, **fields)

    fast = arm("mlp", "int8")
    results = {
        MLP: {0: run(MLP, 0, 100.0), 1: run(MLP, 1, 8.0), 2: run(MLP, 2, 6.0)},
        fast: {1: run(fast, 1, 2.0), 2: run(fast, 2, 0.1, final=None, diverged=1)},
    }
    found = Found(results, {one: MLP.settings(0, TINY) for one in (MLP, fast)})
    assert found.speed_up(fast, MLP) == "4"
    assert found.speed_up(fast, MLP, longer=2.0) == "2"
    assert found.seconds_a_step(fast) == pytest.approx(2.0 / found.settings[fast].steps)


def test_a_line_within_the_picture_is_not_said_to_be_beyond_it() -> None:
    from gradwire_lab.evaluate import charts, pictures

    ends = {"a": 79.0, "b": 79.5, "c": 80.0, "d": 81.0, "e": 82.0, "worse": 60.0, "worst": 10.0}
    drawn = {name: charts.Line([1, 2], [50.0, end]) for name, end in ends.items()}
    chart = charts.Lines(drawn, "step", "test accuracy (%)", metric=METRICS["fashion-mnist"])
    figure = pictures.draw(chart)
    assert figure is not None
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [*"abcde", "worse", "worst (beyond the picture: ends at 10.00%)"]


def test_a_ratio_to_ddp_is_of_equal_seeds() -> None:
    one, ddp = arm("gpt", "raw", every=2), arm("gpt", "ddp")
    losses = {one: {0: 2.5}, ddp: {0: 2.0, 1: 1.0}}
    results = {
        a: {
            seed: RunResult.read(made(ArmRun(a, seed), value=value)["results"][0])
            for seed, value in of_seed.items()
        }
        for a, of_seed in losses.items()
    }
    found = Found(results, {a: a.settings(0, TINY) for a in losses})
    assert diloco._loss(found, one, ddp) == "2.5000, 1.250", "not by the mean of both seeds"


def test_a_page_counts_the_seeds_that_another_page_wanted(tmp_path: Path) -> None:
    three = arm("mlp", "int8", seeds=3)
    store = Store(tmp_path, TINY)
    for seed, value in ((0, 0.4), (1, 0.5), (2, 0.6)):
        store.write(ArmRun(three, seed), made(ArmRun(three, seed), value=value))
    found, lines, unusable = runner.read([arm("mlp", "int8")], store)
    assert found.finals(three) == [0.4, 0.5, 0.6]
    assert (len(lines), unusable) == (3, [])


def test_the_hours_of_what_is_missing() -> None:
    runs = {0: RunResult.read(made(ArmRun(MLP, 0))["results"][0])}
    twice, other = arm("mlp", "int8", seeds=2), arm("lenet", "raw")
    settings = {one: one.settings(0, TINY) for one in (MLP, twice, other)}
    settings[twice] = replace(settings[twice], steps=2 * settings[MLP].steps)
    found = Found({MLP: runs}, settings)
    whole = runs[0].measured_seconds / 3600
    assert found.hours_left([MLP]) == pytest.approx((MLP.seeds - 1) * whole)
    assert found.hours_left([MLP, twice]) == pytest.approx((MLP.seeds + 3) * whole)
    assert found.hours_left([other]) is None
    adam = arm("mlp", "raw", optimizer="adam")  # whose steps may take far longer
    settings[adam] = adam.settings(0, TINY)
    assert found.hours_left([adam]) is None


def test_without_runs_nothing_is_drawn(tmp_path: Path) -> None:
    out = tmp_path / "nothere"
    done = run_command("evaluate", "qsgd", "--draw-only", "--out", out)
    assert done.code == 1
    assert f"no runs in {out}/runs: without --draw-only the command makes them" in done.err
    assert not out.exists()
    stored(out / "runs-0.01", ArmRun(MLP, 0))
    done = run_command("evaluate", "qsgd", "--draw-only", "--out", out)
    assert done.code == 1
    assert f"no runs in {out}/runs, but in {out}/runs-0.01: give the options" in done.err
    assert [path.name for path in out.iterdir()] == ["runs-0.01"]


@pytest.mark.parametrize("options", [[], ["--draw-only"]])
def test_a_file_in_place_of_the_runs_is_said_once(tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "runs"
    path.write_text("mine")
    done = run_command("evaluate", "qsgd", "--out", tmp_path, *options)
    assert done.code == 1
    assert done.err == f"gradwire: error: {path} is a file; results need a folder\n"
    assert done.out == ""
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_says_that_the_same_command_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
    word: str,
) -> None:
    trained: list[Arm] = []

    def train(one: Arm, settings: TrainSettings) -> dict[str, Any]:
        trained.append(one)
        if len(trained) == 2:
            signal.raise_signal(number)
        return made(ArmRun(one, settings.seed), TINY)

    monkeypatch.setattr(runner, "_train_or_observe", train)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    options = ("--scale", TINY.scale, "--out", tmp_path)
    try:
        done = run_command("evaluate", "qsgd", *options)
    finally:
        signal.signal(signal.SIGINT, handler)
    left = len(runner.runs_of(_EVALUATIONS["qsgd"].arms())) - 1
    assert done.code == code
    assert done.err == f"gradwire: {word}; {left} runs left; the same command goes on\n"
    assert f"wrote {tmp_path}/qsgd-0.0005.md" in done.out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (file,) = tmp_path.glob("runs-0.0005/*.jsonl")
    assert len(file.read_text().splitlines()) == 1


def test_only_the_runs_of_an_experiment_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Arm] = []

    def make(arms: list[Arm], store: Store, console: Console) -> int:
        trained.extend(arms)
        return 0

    monkeypatch.setattr(runner, "make", make)
    options = ("--experiment", "Table 2", "--scale", TINY.scale, "--out", tmp_path)
    run_command("evaluate", "terngrad", *options)
    (table_2,) = (e for e in _EVALUATIONS["terngrad"].experiments if e.title.startswith("Table 2"))
    assert trained == list(table_2.arms)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["qsgd", "--experiment", "table"], "no experiment of qsgd is called 'table'"),
        (["adam"], "valid are frontier, 3lc, terngrad, qsgd, inceptionn"),
        (["--resnet", "vgg"], "valid are resnet8, resnet20"),
        (["--data", "mnist"], "valid are fashion-mnist, cifar10"),
        (["--scale", "2"], "should be less than or equal to 1"),
        (["3lc", "--data", "cifar10"], "cifar10 needs --data-dir"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run_command("evaluate", *arguments, "--out", tmp_path)
    assert done.code == 2
    assert said in " ".join(done.err.replace("│", " ").split())
    assert not (tmp_path / "runs").exists()


def test_a_file_is_no_place_for_results(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    done = run_command("evaluate", "qsgd", "--draw-only", "--out", tmp_path / "notes")
    assert done.code == 1
    assert f"{tmp_path / 'notes'} is a file; results need a folder" in done.err
    assert (tmp_path / "notes").read_text() == "mine"


def test_the_numbers_of_the_runs_as_json(tmp_path: Path) -> None:
    one = next(arm for arm in _EVALUATIONS["qsgd"].arms() if arm.task == "mlp")
    setup = Setup(scale=0.5)
    store = Store(tmp_path / "runs-0.5", setup)
    store.write(ArmRun(one, 0), made(ArmRun(one, 0), setup))
    options = ("--draw-only", "--scale", "0.5", "--json", "--out", tmp_path)
    (evaluation,) = run_command("evaluate", "qsgd", *options).json["evaluations"]
    (run,) = evaluation["runs"]
    assert (run["model"], run["codec"], run["final"]) == ("mlp", one.codec, 0.5)
    assert run["push_payload_bits"] == 4.0
    document = json.loads(store.path(ArmRun(one, 0)).read_text())
    assert document["result"]["hook_of_rank"] == [], "lines are short"


def test_sz3_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pysz", None)
    with pytest.raises(TrainError, match=r"pysz not installed.*\./lab\[evaluate\]"):
        sz.encode(np.zeros(8, np.float32), 10)


def test_sz3_keeps_its_bound() -> None:
    pytest.importorskip("pysz")
    values = np.random.default_rng(0).normal(0, 0.01, 5000).astype(np.float32)
    data = sz.encode(values, bound := sz.bound_of("sz3:bound=10") or 0)
    decoded = sz.decode(data, values.size)
    assert 0 < np.abs(values - decoded).max() <= 2.0**-bound
    assert len(data) < values.nbytes / 4
    assert sz.bound_of("inceptionn:bound=10") is None


def test_gradients_are_observed(tmp_path: Path) -> None:
    one = arm("mlp", "raw", observed=("inceptionn:bound=6", "terngrad"), steps=4000, workers=2)
    store = Store(tmp_path, TINY)
    assert runner.make([one], store, Console(quiet=True)) == 0
    found, _, _ = runner.read([one], store)
    observed = found.observed[one]
    assert observed.steps == [0, 1]
    weights = [numel for _, numel in observed.tensors]
    assert weights[0] == 784 * 256
    sparse, ternary = (observed.codecs[codec] for codec in one.observed)
    for of_step, densities in zip(sparse["class_shares"], sparse["density"], strict=True):
        for shares, density in zip(of_step, densities, strict=True):
            assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
            assert density <= 1.0 - shares["0"] + 1e-3
    assert all(error > 0.0 for of_step in ternary["error"] for error in of_step)
    assert "class_shares" not in ternary
    (drawn,) = observed.histograms.values()
    assert sum(drawn["gradient"]) == pytest.approx(1.0, abs=0.01)
    clipped = [
        share for share, edge in zip(drawn["clipped"], drawn["edges"], strict=False) if edge > 2.6
    ]
    assert sum(clipped) == 0.0
