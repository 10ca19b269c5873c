"""From records of ranks to the table, the JSON and the plots."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gradwire_lab.train import report, report_table
from gradwire_lab.train.network import Bytes
from gradwire_lab.train.records import MetricValue, RankRecord
from gradwire_lab.train.report import Conditions, Report, RunResult
from gradwire_lab.train.settings import TrainSettings

PARAMETERS = 1000
SETTINGS = TrainSettings(codecs=("raw", "3lc"), workers=2, bandwidth=1_000_000, steps=4)
SHAPED = Conditions(shaped=True, modelled=False)
MODELLED = Conditions(shaped=False, modelled=True, note="no right")


def record(codec: str, rank: int, seconds: float, push: int, pull: int) -> RankRecord:
    """A record of 4 steps; in each the rank sends `push` and `pull` bytes."""
    return RankRecord(
        codec,
        rank,
        seconds=seconds,
        losses=[4.0 + rank, 3.0, 2.0, 1.0],
        push_bytes=[push] * 4,
        pull_bytes=[pull] * 4,
        evaluations=[MetricValue(2, seconds / 2, 0.4), MetricValue(4, seconds, 0.75)]
        if rank == 0
        else [],
        hook={
            "push_bytes": 4 * push,
            "pull_bytes": 4 * pull,
            "control_bytes": 8,
            "received_bytes": 4 * (push + pull),
            "wire_seconds": 0.5 + 0.25 * rank,
        },
        link=Bytes(10_000 + rank, 20_000),
        parameters_digest="same",
    )


def records(seconds: float = 8.0) -> list[list[RankRecord]]:
    raw = [record("raw", rank, seconds, push=2000, pull=2000) for rank in range(2)]
    small = [record("3lc", rank, seconds / 4, push=100 + 100 * rank, pull=50) for rank in range(2)]
    return [raw, small]


def assemble(
    settings: TrainSettings, parameters: int, links: Conditions, runs: list[list[RankRecord]]
) -> Report:
    results = [report.result_of(settings, parameters, links, ranks) for ranks in runs]
    return Report(settings, parameters, "data", links, results)


def test_bytes_bits_and_ratio() -> None:
    raw, small = assemble(SETTINGS, PARAMETERS, SHAPED, records()).results
    assert (raw.push_bits_per_value, raw.pull_bits_per_value) == (32.0, 32.0)
    assert raw.ratio == pytest.approx(16000 / 16008)
    assert small.push_bytes == 600
    assert small.push_bits_per_value == pytest.approx(32 * 600 / 8000)
    assert small.push_bits == pytest.approx([32 * 150 / 2000] * 4)
    assert small.pull_bits == pytest.approx([32 * 50 / 2000] * 4)
    assert small.ratio == pytest.approx(16000 / (600 + 200 + 8))
    assert raw.link == Bytes(10_000, 20_000)  # the mean of both, rounded to even
    assert raw.loss == [4.5, 3.0, 2.0, 1.0]


def test_speed_up_is_against_the_first_codec() -> None:
    made = assemble(SETTINGS, PARAMETERS, SHAPED, records())
    assert (made.speedup("raw"), made.speedup("3lc")) == (1.0, 4.0)
    small = made.results[1]
    assert (small.seconds, small.measured_seconds) == (2.0, 2.0)
    assert small.final == 0.75


def test_modelled_times_replace_the_wire() -> None:
    raw, small = assemble(SETTINGS, PARAMETERS, MODELLED, records(seconds=8.0)).results
    assert raw.measured_seconds == 8.0
    assert raw.seconds == pytest.approx(8.0 - 0.5 + 16000 * 8 / 1e6)
    assert small.seconds == pytest.approx(2.0 - 0.5 + 1000 * 8 / 1e6)
    assert raw.evaluations[0].seconds == pytest.approx(raw.seconds / 2)


def test_rivals_have_computed_bytes_and_tell_no_time_on_the_wire() -> None:
    computed = {"push_bytes": 4000, "pull_bytes": 4000, "control_bytes": 0, "computed": True}
    ranks = [replace(r, codec="torch:bf16", hook=computed) for r in records()[0]]
    made = assemble(SETTINGS, PARAMETERS, MODELLED, [ranks])
    (rival,) = made.results
    assert rival.seconds == pytest.approx(8.0 + 8000 * 8 / 1e6)
    assert (rival.push_bits_per_value, rival.ratio) == (16.0, 2.0)
    assert "torch:bf16: MB, bits and ratio are computed for a ring all-reduce" in printed(made)


@pytest.mark.parametrize(
    ("change", "noted"),
    [
        ({"clip": 1.0}, True),
        ({"clip": 0.0}, False),
        ({"clip": 1.0, "compress": "updates"}, False),
        ({"clip": 1.0, "optimizer": "adamw"}, False),
    ],
)
def test_a_gradient_that_is_clipped_after_a_coarse_codec(
    change: dict[str, Any], noted: bool
) -> None:
    text = printed(assemble(replace(SETTINGS, **change), PARAMETERS, SHAPED, records()))
    assert ("\n3lc: values that are sent late come together" in text) == noted


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each line, by the first."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_the_time_to_a_goal() -> None:
    settings = replace(SETTINGS, codecs=("3lc",), until=0.6)
    raw, small = records()
    small[0].evaluations = [MetricValue(2, 1.0, 0.4), MetricValue(4, 2.0, 0.5)]
    made = assemble(settings, PARAMETERS, SHAPED, [raw, small])
    assert [made.time_to_goal(result) for result in made.results] == [8.0, None]
    document = made.to_json({})
    assert document["goal"] == 0.6
    assert [one["seconds_to_goal"] for one in document["results"]] == [8.0, None]
    text = printed(made)
    assert "s to 60.00%: " in text
    assert "Not reached by 3lc." in text
    assert (rows(text)["raw"][4], rows(text)["3lc"][4]) == ("8.0", "-")
    assert made.settings.metric.reached(0.6, 0.6)
    assert not replace(settings, data="text").metric.reached(0.7, 0.6)  # a loss
    assert replace(settings, data="text").metric.reached(0.5, 0.6)


def test_the_goal_is_just_worse_than_the_first_codec() -> None:
    raw, small = records()
    small[0].evaluations = [MetricValue(2, 1.0, 0.7449), MetricValue(4, 2.0, 0.7451)]
    made = assemble(SETTINGS, PARAMETERS, SHAPED, [raw, small])
    assert made.goal == pytest.approx(0.75 - 0.005)
    assert [made.time_to_goal(result) for result in made.results] == [8.0, 2.0]
    text = printed(made)
    assert "evaluations not counted" in text
    assert "0.5 points worse than raw at its end." in text
    assert "Not reached" not in text
    loss = assemble(replace(SETTINGS, model="gpt", data="text"), PARAMETERS, SHAPED, [raw, small])
    assert loss.goal == pytest.approx(0.75 + 0.02)
    assert "0.02 nats worse than raw" in printed(loss)


def test_without_two_codecs_or_a_run_of_the_first_there_is_no_goal() -> None:
    alone = assemble(SETTINGS, PARAMETERS, SHAPED, [records()[0]])
    assert alone.goal is None
    made = assemble(SETTINGS, PARAMETERS, SHAPED, [*seeds([None]), records()[0]])
    assert made.goal is None
    assert made.to_json({})["results"][0]["seconds_to_goal"] is None
    assert "s to" not in printed(made)


def test_the_time_to_a_goal_is_a_mean_if_every_seed_reached_it() -> None:
    settings = replace(SETTINGS, codecs=("3lc",), seeds=2, until=0.6)
    some = assemble(settings, PARAMETERS, SHAPED, seeds([0.5, 0.75]))
    assert [some.time_to_goal(result) for result in some.results] == [None, 3.0]
    assert rows(printed(some))["3lc"][5] == "-"
    both = assemble(settings, PARAMETERS, SHAPED, seeds([0.75, 0.75]))
    assert rows(printed(both))["3lc"][5] == "2.5"


def test_servers_carry_what_all_workers_push() -> None:
    settings = replace(SETTINGS, exchange="server")
    ranks = [record("3lc", rank, 2.0, push=100, pull=50) for rank in range(2)]
    for rank in ranks:
        assert rank.hook is not None
        rank.hook["role"] = "worker"
    late = ranks[1]
    late.losses[2] = late.push_bytes[2] = late.pull_bytes[2] = None
    server = RankRecord("3lc", 2, seconds=60.0)
    server.hook = {"role": "server", "push_bytes": 800, "pull_bytes": 400, "wire_seconds": 58.0}
    server.hook["dropped_pushes"] = {"0": 0, "1": 3}
    made = assemble(settings, PARAMETERS, MODELLED, [[*ranks, server]])
    (result,) = made.results
    assert result.measured_seconds == 2.0  # the workers'; the server's begins earlier
    assert result.seconds == pytest.approx(60.0 - 58.0 + 800 * 8 / 1e6)
    assert result.push_bits_per_value == pytest.approx(32 * 400 / 16000)
    assert result.push_bits == pytest.approx([0.8] * 4)
    assert result.loss == [4.5, 3.0, 2.0, 1.0]
    assert result.ratio == pytest.approx(32000 / (400 + 200 + 8))
    assert result.hook_of_rank[2] == server.hook
    text = printed(made)
    assert "a server received 0.001 MB and sent 0.000 MB" in text
    assert "dropped: 3 of worker 1." in text
    assert "bit-identical" in text
    again = replace(result, seed=1)
    two = replace(made, settings=replace(settings, codecs=("3lc",), seeds=2))
    notes = report_table.footnotes(replace(two, results=[result, again]))
    served = [note for note in notes if "a server received" in note]
    assert [note.partition(":")[0] for note in served] == ["3lc seed 0", "3lc seed 1"]
    twice = replace(made, results=[result, result])
    assert report_table.footnotes(twice) == report_table.footnotes(made)


def test_one_worker_sends_nothing() -> None:
    alone = record("raw", 0, 1.0, push=0, pull=0)
    (result,) = assemble(replace(SETTINGS, workers=1), PARAMETERS, SHAPED, [[alone]]).results
    assert result.ratio is None
    assert result.push_bits == []


def printed(shown: Report) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report_table.table(shown))
    assert "…" not in capture.get()
    return "\n".join([capture.get(), *report_table.footnotes(shown)])


def test_a_long_codec_leaves_room_for_the_numbers() -> None:
    usual = [replace(one, codec="3lc:s=1.00,coder=rice") for one in records()[1]]
    long = [replace(one, codec="torch:powersgd:rank=4,start=10") for one in records()[1]]
    settings = replace(SETTINGS, codecs=("raw", "3lc:s=1.00,coder=rice"))
    lines = printed(assemble(settings, PARAMETERS, SHAPED, [records()[0], usual, long])).split("\n")
    at = [line.startswith("3lc:s=1.00, ") for line in lines].index(True)
    assert lines[at].endswith(" 0.010")
    assert lines[at + 1].strip() == "coder=rice"


def test_the_table() -> None:
    large = [replace(r, codec="3lc:s=1.00", seconds=2345.6) for r in records()[0]]
    text = printed(assemble(SETTINGS, PARAMETERS, SHAPED, [*records(), large]))
    assert rows(text)["3lc"] == [
        *("3lc", "75.00%", "2.0", "4.00", "2.0", "0.001", "2.40", "0.800", "19.8", "0.010"),
    ]
    assert "wall" in text
    assert "modelled" not in text.lower()
    assert "bit-identical" in text


def seeds(values: list[float | None]) -> list[list[RankRecord]]:
    """Two ranks' records of a run with each final value; None: it diverged in its second step."""
    runs = []
    for seed, value in enumerate(values):
        ranks = [record("3lc", rank, 2.0 + seed, push=100, pull=50) for rank in range(2)]
        for rank in ranks:
            rank.seed = seed
            if value is None:
                rank.diverged, rank.losses, rank.evaluations = 2, [4.0, None, None, None], []
            elif rank.rank == 0:
                rank.evaluations = [MetricValue(4, 2.0 + seed, value)]
        runs.append(ranks)
    return runs


def test_seeds_are_one_row_with_mean_and_spread() -> None:
    settings = replace(SETTINGS, codecs=("3lc",), seeds=2)
    made = assemble(settings, PARAMETERS, SHAPED, seeds([0.5, 0.75]))
    text = printed(made)
    assert "62.50%" in text
    assert " 12.50% " in text
    assert " 2.5 " in text  # seconds
    assert "Means of 2 seeds; " in text
    assert made.to_json({})["results"][1]["seed"] == 1


def test_a_run_that_diverged_is_said_and_left_out_of_the_means() -> None:
    settings = replace(SETTINGS, codecs=("3lc",), seeds=3)
    made = assemble(settings, PARAMETERS, SHAPED, seeds([0.5, None, 0.75]))
    text = printed(made)
    assert "62.50%" in text
    assert "3lc, seed 1: DIVERGED in step 2" in text
    assert "without those that diverged or failed" in text
    lost = made.results[1]
    assert (lost.final, lost.diverged, lost.loss) == (None, 2, [4.0])
    json.dumps(made.to_json({}), allow_nan=False)
    alone = assemble(SETTINGS, PARAMETERS, SHAPED, seeds([None]))
    assert "diverged" in printed(alone)
    assert alone.speedup("3lc") is None


def test_seeds_that_are_not_there_yet_are_not_called_failed() -> None:
    settings = replace(SETTINGS, codecs=("3lc", "raw"), seeds=2)
    some = assemble(settings, PARAMETERS, SHAPED, [*seeds([0.5, 0.75]), records()[0]])
    assert "Means of 2 seeds (raw: 1); " in printed(some)
    lost = assemble(settings, PARAMETERS, SHAPED, [*seeds([0.5, None]), records()[0]])
    assert "Means of 2 seeds (raw: 1), without those that diverged or failed; " in printed(lost)


def test_a_run_that_failed_is_said_and_left_out_of_the_means() -> None:
    settings = replace(SETTINGS, codecs=("3lc",), seeds=2)
    runs = seeds([0.5, 0.75])
    for rank in runs[1]:
        rank.failed = "'auto:bits=1' can't be kept"
    made = assemble(settings, PARAMETERS, SHAPED, runs)
    text = printed(made)
    assert "50.00%" in text
    assert "3lc, seed 1: FAILED: 'auto:bits=1' can't be kept." in text
    assert "without those that diverged or failed" in text
    assert RunResult.read(made.to_json({})["results"][1]).failed == runs[1][0].failed
    assert "failed" in printed(assemble(SETTINGS, PARAMETERS, SHAPED, runs[1:]))


def test_a_text_has_a_loss_in_the_place_of_an_accuracy() -> None:
    settings = replace(SETTINGS, codecs=("3lc",), model="gpt", data="text")
    made = assemble(settings, PARAMETERS, SHAPED, seeds([2.0694]))
    text = printed(made)
    assert "held-out" in text
    assert "2.0694" in text
    assert "accuracy" not in text
    assert made.to_json({})["metric"] == "held_out_loss"


def test_modelled_times_are_marked_everywhere() -> None:
    modelled = assemble(SETTINGS, PARAMETERS, MODELLED, records())
    text = printed(modelled)
    assert "MODELLED" in text
    assert "modelled" in text
    assert "wall" not in text
    document = modelled.to_json({})
    assert document["times"] == "modelled"
    assert document["links"]["note"] == "no right"
    assert document["links"]["shaped"] is False


def test_remarks_of_the_hook_are_told_once() -> None:
    run = records()[0]
    for rank in run:
        assert rank.hook is not None
        rank.hook["remarks"] = ["compression does not pay"]
    shown = assemble(SETTINGS, PARAMETERS, SHAPED, [run])
    told = [note for note in report_table.footnotes(shown) if "does not pay" in note]
    assert told == [f"{run[0].codec}: compression does not pay."]


def test_replicas_that_differ_are_named() -> None:
    both = records()
    both[1][1].parameters_digest = "other"
    shown = assemble(SETTINGS, PARAMETERS, SHAPED, both)
    assert "DIFFER between the ranks after: 3lc" in printed(shown)


def test_json_is_json() -> None:
    shown = assemble(SETTINGS, PARAMETERS, SHAPED, records())
    document = json.loads(json.dumps(shown.to_json({"cpu": "x"}), allow_nan=False))
    assert document["results"][1]["ratio"] == shown.results[1].ratio
    assert document["settings"]["codecs"] == ["raw", "3lc"]
    assert document["settings"]["bandwidth"] == 1_000_000


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    from gradwire_lab.train import plots

    shown = assemble(SETTINGS, PARAMETERS, MODELLED, records())
    written = plots.write(shown, tmp_path / "new")
    assert [path.name for path in written] == [
        *("accuracy.png", "accuracy_of_steps.png", "loss.png", "bits.png", "frontier.png")
    ]
    for path in written:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", head[16:])) >= 700

    (axes,) = plots.draw_metric(shown).axes
    *lines, goal = axes.get_lines()
    assert [np.asarray(line.get_xdata())[-1] for line in lines] == [
        pytest.approx(result.seconds) for result in shown.results
    ]
    assert np.asarray(goal.get_ydata()).tolist() == pytest.approx([74.5, 74.5])
    assert [text.get_text() for text in axes.texts] == ["goal: 74.50%"]
    assert axes.get_xlabel() == "training time, modelled (s, logarithmic)"

    (axes,) = plots.draw_metric(shown, "step").axes
    assert np.asarray(axes.get_lines()[1].get_xdata()).tolist() == [2, 4]

    def drawn(axes: Axes) -> list[float]:
        return [float(y) for y in np.asarray(axes.get_lines()[1].get_ydata())]

    push, pull = plots.draw_bits(shown).axes
    assert drawn(push) == pytest.approx(shown.results[1].push_bits)
    assert drawn(pull) == pytest.approx(shown.results[1].pull_bits)


def test_plots_of_seeds_and_of_a_run_that_diverged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gradwire_lab.train import plots

    settings = replace(SETTINGS, codecs=("3lc",), seeds=3, model="gpt", data="text", until=2.6)
    shown = assemble(settings, PARAMETERS, SHAPED, seeds([2.5, None, 2.25]))
    names = [path.name for path in plots.write(shown, tmp_path)]
    assert names == ["held_out_loss.png", "held_out_loss_of_steps.png", "loss.png", "bits.png"]
    (axes,) = plots.draw_metric(shown).axes
    assert len(axes.get_lines()) == 3 + 1  # the goal
    assert axes.get_ylabel() == "held-out loss (nats a byte)"
    assert axes.figure is not None
    (legend,) = axes.figure.legends
    # A codec is named once, with the means of the runs that did not diverge.
    assert [text.get_text() for text in legend.get_texts()] == ["3lc (2.3750 after 3 s)"]


@pytest.mark.filterwarnings("error")
def test_pictures_without_a_line_have_no_legend() -> None:
    pytest.importorskip("matplotlib")
    from gradwire_lab.train import plots

    ranks = [record("qsgd", rank, 2.0, push=100, pull=0) for rank in range(2)]
    push, pull = plots.draw_bits(assemble(SETTINGS, PARAMETERS, SHAPED, [ranks])).axes
    assert push.get_legend() is not None
    assert (pull.get_legend(), len(pull.get_lines())) == (None, 0)


def test_plots_without_our_hook_have_no_bits(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gradwire_lab.train import plots

    ranks = [replace(r, codec="ddp", hook=None, push_bytes=[], pull_bytes=[]) for r in records()[0]]
    shown = assemble(SETTINGS, PARAMETERS, SHAPED, [ranks])
    assert [path.name for path in plots.write(shown, tmp_path)] == [
        *("accuracy.png", "accuracy_of_steps.png", "loss.png")
    ]


def test_moving_average() -> None:
    from gradwire_lab.train.plots import moving_average

    assert moving_average([1.0, 2.0, 3.0, 6.0], 2) == [1.5, 2.5, 4.5]
    assert moving_average([1.0, 2.0], 1) == [1.0, 2.0]


def test_steps_between_exchanges_are_told_and_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gradwire_lab.train import plots

    ranks = [record("3lc", rank, 2.0, push=100, pull=50) for rank in range(2)]
    for rank in ranks:
        rank.push_bytes = rank.pull_bytes = [0, 200, 0, 200]
    made = assemble(replace(SETTINGS, every=2), PARAMETERS, SHAPED, [ranks])
    assert any("every 2 steps" in note for note in report_table.footnotes(made))
    drawn = plots.draw_bits(made).axes[0].get_lines()[0]
    assert np.asarray(drawn.get_xdata()).tolist() == [2, 4]
