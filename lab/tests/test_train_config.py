"""`gradwire train --config`: settings from TOML and from the report of an earlier run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import cli_runner
from gradwire_lab.train import data, run, worker
from gradwire_lab.train.config import read_config
from gradwire_lab.train.options import from_options
from gradwire_lab.train.settings import Rule, SettingsError, TrainSettings

TOML = """
codecs = ["ddp", "3lc:s=1.75"]
workers = 3
bandwidth = "2.5gbit"
rules = ["fc*=bf16@push"]
learning_rate = 1
data_dir = "images"
init = "model.safetensors"
"""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[TrainSettings]:
    """The settings with which a training would have begun."""
    found: list[TrainSettings] = []
    monkeypatch.setattr(run, "train_here", lambda settings, *_: found.append(settings))
    monkeypatch.setattr(worker, "world_of_torchrun", lambda: None)
    return found


def train(*words: object) -> cli_runner.Result:
    return cli_runner.run("train", *words)


def test_the_file_gives_settings_and_the_command_line_wins(
    tmp_path: Path, chosen: list[TrainSettings]
) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    train("--config", tmp_path / "run.toml", "--workers", 4, "--codec", "raw", "--steps", 7)
    (settings,) = chosen
    assert (settings.workers, settings.codecs, settings.steps) == (4, ("raw",), 7)
    assert (settings.bandwidth, settings.learning_rate) == (2_500_000_000, 1)
    assert settings.rules == (Rule("fc*", "bf16", "push"),)
    assert settings.data_dir == Path("images")
    assert settings.init == Path("model.safetensors")


def test_an_option_that_is_typed_wins_though_it_has_its_default(
    tmp_path: Path, chosen: list[TrainSettings]
) -> None:
    (tmp_path / "run.toml").write_text("steps = 9\nlatency = 3.0")
    train("--config", tmp_path / "run.toml", "--steps", TrainSettings.steps)
    assert (chosen[0].steps, chosen[0].latency) == (TrainSettings.steps, 3.0)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--model gpt --bandwidth none --seeds 3 --seed 5",
        "--model resnet20 --data-dir x --rules fc=raw --rules a*=bf16@pull --exclude b --until 0.5",
        "--exchange one-process --codec 3lc --width 8 --model resnet8",
        "--model gpt --every 4 --outer nesterov --fragments 2 --bandwidth 0.1gbit --latency 20",
    ],
)
def test_the_settings_of_a_report_are_a_configuration(
    words: str, tmp_path: Path, chosen: list[TrainSettings]
) -> None:
    """With none of them derived again: all of them are in the report."""
    train(*words.split())
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"settings": chosen[0].to_json()}))
    train("--config", report)
    assert chosen[0] == chosen[1]
    derived = {"threads": 1, "steps": 1, "workers": 1, "model": "lenet"}
    assert from_options(derived | read_config(report)) == chosen[0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "lr = 0.1", "unknown key 'lr'; valid are codecs, workers, bandwidth, latency, "),
        ("a.toml", "steps = '9'", "`steps` is a text, not a whole number"),
        ("a.toml", "steps = true", "`steps` is true or false, not a whole number"),
        ("a.toml", "codecs = 'ddp'", "`codecs` must be a list of texts"),
        ("a.toml", "rules = [1]", "`rules` must be a list of texts"),
        ("a.toml", "bandwidth = 10", "`bandwidth` must be a text, such as '10mbit'"),
        ("a.toml", "steps = ", "Invalid value"),
        ("a.toml", "steps = 1\nsteps = 2", "Cannot overwrite a value"),
        ("a.json", "{}", "no `settings` are there"),
        ("a.json", "[", "it is cut off or no JSON"),
    ],
)
def test_what_is_no_configuration(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_config(tmp_path / name)
    assert caught.value.option == "--config"
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert said in str(caught.value)


def test_values_are_checked_as_those_of_options(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("workers = 251")
    said = train("--config", tmp_path / "a.toml")
    assert said.code == 2
    assert "251 is not valid; valid are 1 to 250" in " ".join(said.err.replace("│", " ").split())
    missing = train("--config", tmp_path / "b.toml")
    assert missing.code == 1
    assert "b.toml" in missing.err


def test_only_the_rank_that_reports_needs_places_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of torchrun start at once, and may be on other machines."""
    (tmp_path / "file").touch()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "load", stop)
    options = ["--out", tmp_path / "file" / "runs", "--json", tmp_path / "file" / "report.json"]
    monkeypatch.setattr(worker, "world_of_torchrun", lambda: (1, 2))
    assert train(*options).code == 130
    monkeypatch.setattr(worker, "world_of_torchrun", lambda: (0, 2))
    assert train(*options).code == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no files")
@pytest.mark.parametrize("option", ["--out", "--plots", "--report"])
def test_a_place_that_takes_no_files_is_found_before_the_training(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(worker, "world_of_torchrun", lambda: None)
    said = train(option, "/proc/page.html" if option == "--report" else "/proc").err
    assert "/proc cannot be written to: " in said
