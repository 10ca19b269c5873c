"""Exchanges in the settings of `gradwire train`; lab/tests/test_train_ranks.py trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradwire_lab.train import checks, options, settings
from gradwire_lab.train.settings import SettingsError, TrainSettings


@pytest.mark.parametrize(
    ("change", "option", "said"),
    [
        (
            {"exchange": "star"},
            "--exchange",
            f"valid are {', '.join(settings.HOOKED)}, server, ",
        ),
        ({"every": 0}, "--every", "valid are 1 to 400"),
        ({"every": 3}, "--steps", "400 is no multiple of --every 3"),
        ({"every": 4, "eval_every": 10}, "--eval-every", "10 is no multiple of --every 4"),
        ({"every": 2, "compress": "updates", "start_iter": 2}, "--start-iter", "sharded, ring"),
        ({"every": 2, "exchange": "sharded-optimizer"}, "--every", "in every step"),
        ({"exchange": "sharded-optimizer", "start_iter": 2}, "--start-iter", "sharded, ring"),
        (
            {"exchange": "terngrad"},
            "--codec",
            "goes with raw, terngrad, ddp, torch:.* not with 3lc",
        ),
        ({"every": 2, "exchange": "server"}, "--every", "server exchanges in every step"),
        ({"backup_workers": 1}, "--backup-workers", "goes only with --exchange server"),
        ({"servers": 2}, "--servers", "goes only with --exchange server"),
        ({"backup_workers": 4, "exchange": "server"}, "--backup-workers", "valid are 0 to 3"),
        ({"barrier": "tensor"}, "--barrier", "goes only with --exchange server"),
        ({"barrier": "layer", "exchange": "server"}, "--barrier", "valid are step, tensor"),
        ({"servers": 0, "exchange": "server"}, "--servers", "valid are 1 to 100"),
        (
            {"exchange": "server:pulls=model"},
            "--exchange",
            "valid are server, server:pulls=gradients, server:pulls=updates",
        ),
        *(
            ({"exchange": "server:pulls=gradients", name: value}, option, "pushes of all workers")
            for name, value, option in (
                ("staleness", 1, "--staleness"),
                ("backup_workers", 1, "--backup-workers"),
                ("barrier", "tensor", "--barrier"),
            )
        ),
        (
            {"exchange": "one-process", "codecs": ("ddp",)},
            "--bandwidth",
            "sends nothing; valid is none",
        ),
        (
            {"exchange": "one-process", "bandwidth": None, "codecs": ("ddp", "torch:bf16")},
            "--codec",
            "cannot run torch:bf16: it needs real ranks",
        ),
        (
            {"exchange": "one-process:pulls=model", "bandwidth": None},
            "--exchange",
            "valid are one-process, one-process:pulls=gradients, one-process:pulls=updates",
        ),
        (
            {"exchange": "one-process:pulls=gradients", "compress": "updates"},
            "--compress",
            "goes with gradients; valid for updates is one-process",
        ),
        (
            {"exchange": "sharded-optimizer:pulls=gradients"},
            "--exchange",
            "sharded-optimizer has no parameters",
        ),
    ],
)
def test_exchanges_that_no_run_can_have(change: dict[str, Any], option: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        checks.check(replace(TrainSettings(), **change))
    assert caught.value.option == option


def test_evaluations_fall_on_exchanges() -> None:
    assert options.default_eval_every(400, 1) == 40
    assert options.default_eval_every(400, 16) == 48
    assert options.default_eval_every(5, 1) == 1
