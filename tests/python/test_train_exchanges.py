"""`gradwire train` with every exchange: four workers learn and end with the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.train import settings
from gradwire.train.settings import SettingsError, TrainSettings
from small_data import write_fashion_mnist

pytest.importorskip("torch")

GRADWIRE = str(Path(sys.executable).with_name("gradwire"))
STEPS = 24
WAYS = {
    "sharded": ["--exchange", "sharded"],
    "ring": ["--exchange", "ring"],
    "server": ["--exchange", "server"],
    "terngrad": ["--exchange", "terngrad", "--codec", "terngrad"],
    "sharded-optimizer": ["--exchange", "sharded-optimizer"],
    "local steps": ["--every", "4"],
    "one-process": ["--exchange", "one-process", "--every", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion_mnist(tmp_path_factory.mktemp("data") / "fashion-mnist", 2000, 500)


@pytest.mark.parametrize("way", WAYS)
def test_workers_learn_and_agree(way: str, folder: Path) -> None:
    command = [GRADWIRE, "train", "--workers", "4", "--batch", "16", "--data-dir", str(folder)]
    command += ["--bandwidth", "none", "--steps", str(STEPS), "--eval-every", "12", "--json", "-"]
    command += WAYS[way] if "--codec" in WAYS[way] else ["--codec", "3lc:s=1.0", *WAYS[way]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    (run,) = report["results"]
    assert run["replicas_identical"]
    assert len(run["loss"]) == STEPS
    assert sum(run["loss"][-4:]) < 0.99 * sum(run["loss"][:4])
    every = report["settings"]["every"]
    assert [bits > 0 for bits in run["push_bits"]] == [
        (step + 1) % every == 0 for step in range(STEPS)
    ]
    assert run["hook_of_rank"][0]["steps"] == STEPS // every
    exchange = report["settings"]["exchange"]
    assert f"exchange   {exchange}, every " in result.stderr
    assert run["ratio"] > 4


def test_servers_go_on_without_the_last_worker(folder: Path) -> None:
    command = [GRADWIRE, "train", "--workers", "3", "--batch", "16", "--data-dir", str(folder)]
    command += ["--bandwidth", "none", "--steps", "12", "--eval-every", "6", "--json", "-"]
    command += ["--exchange", "server", "--servers", "2", "--backup-workers", "1"]
    command += ["--codec", "ddp", "--codec", "3lc:s=1.0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    plain, served = json.loads(result.stdout)["results"]
    assert plain["hook_of_rank"] == [None] * 5  # the servers have nothing to do there
    assert served["replicas_identical"]
    assert len(served["loss"]) == len(served["push_bits"]) == 12
    assert [evaluation["step"] for evaluation in served["evaluations"]][-1] == 12
    workers, servers = served["hook_of_rank"][:3], served["hook_of_rank"][3:]
    assert [hook["role"] for hook in servers] == ["server", "server"]
    # A version lacks pushes that a server dropped, or that a worker never computed.
    dropped = sum(sum(hook["dropped_pushes"].values()) for hook in servers)
    taken = sum(hook["steps"] for hook in workers)
    # Pushes that workers held back from servers that were ahead.
    held_back = sum(sum(hook["dropped_pushes"].values()) for hook in workers)
    assert 12 * 2 <= taken <= 12 * 3
    assert 2 * taken - held_back - dropped == 2 * 12 * 2
    assert ("were dropped: none" in result.stderr) == (dropped == 0)


@pytest.mark.parametrize(
    ("change", "option", "said"),
    [
        (
            {"exchange": "star"},
            "--exchange",
            "valid are sharded, ring, terngrad, hierarchical, server, ",
        ),
        ({"every": 0}, "--every", "valid are 1 to 400"),
        ({"every": 3}, "--steps", "400 is no multiple of --every 3"),
        ({"every": 4, "eval_every": 10}, "--eval-every", "10 is no multiple of --every 4"),
        ({"every": 2, "start_iter": 2}, "--start-iter", "sharded, ring"),
        ({"every": 2, "exchange": "sharded-optimizer"}, "--every", "in every step"),
        ({"exchange": "sharded-optimizer", "start_iter": 2}, "--start-iter", "sharded, ring"),
        ({"exchange": "terngrad"}, "--codec", "goes with raw, terngrad and ddp, not with bf16"),
        ({"every": 2, "exchange": "server"}, "--every", "server exchanges in every step"),
        ({"backup_workers": 1}, "--backup-workers", "goes only with --exchange server"),
        ({"servers": 2}, "--servers", "goes only with --exchange server"),
        ({"backup_workers": 4, "exchange": "server"}, "--backup-workers", "valid are 0 to 3"),
        ({"servers": 0, "exchange": "server"}, "--servers", "valid are 1 to 100"),
        ({"exchange": "one-process"}, "--bandwidth", "sends nothing; valid is none"),
        ({"exchange": "one-process", "exclude": ("fc*",)}, "--exclude", "does not go with"),
        (
            {"exchange": "one-process", "bandwidth": None, "codecs": ("ddp",)},
            "--codec",
            "not with ddp",
        ),
    ],
)
def test_exchanges_that_no_run_can_have(change: dict[str, Any], option: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        settings.check(replace(TrainSettings(), **change))
    assert caught.value.option == option


def test_evaluations_fall_on_exchanges() -> None:
    assert settings.default_eval_every(400, 1) == 40
    assert settings.default_eval_every(400, 16) == 48
    assert settings.default_eval_every(5, 1) == 1
