"""The settings that `gradwire train` accepts, and its messages for others."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.train import settings
from gradwire.train.schedule import learning_rate
from gradwire.train.settings import Rule, SettingsError, TrainSettings


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10mbit", 10_000_000),
        ("100mbit", 100_000_000),
        ("1gbit", 1_000_000_000),
        ("2.5gbit", 2_500_000_000),
        ("64kbit", 64_000),
        ("none", None),
    ],
)
def test_bandwidth_is_read_and_written_alike(text: str, bits: int | None) -> None:
    assert settings.parse_bandwidth(text) == bits
    assert settings.format_bandwidth(bits) == text


@pytest.mark.parametrize("text", ["", "10", "10 mbit", "10MBit", "-1mbit", "0mbit", "1e3mbit"])
def test_another_bandwidth_is_an_error_that_lists_the_valid(text: str) -> None:
    with pytest.raises(SettingsError, match="10mbit, 100mbit, 1gbit, none") as caught:
        settings.parse_bandwidth(text)
    assert caught.value.option == "--bandwidth"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("fc*=bf16", Rule("fc*", "bf16")),
        (
            "conv1.weight=3lc:s=1.5,coder=none@push",
            Rule("conv1.weight", "3lc:s=1.5,coder=none", "push"),
        ),
        ("*=raw@pull", Rule("*", "raw", "pull")),
    ],
)
def test_rules(text: str, rule: Rule) -> None:
    assert settings.parse_rule(text) == rule


@pytest.mark.parametrize("text", ["", "fc", "=raw", "fc=", "fc=raw@", "fc=raw@both"])
def test_a_rule_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SettingsError, match="PATTERN=CODEC@pull"):
        settings.parse_rule(text)


@pytest.mark.parametrize(
    ("change", "option", "said"),
    [
        ({"model": "vgg"}, "--model", "valid are lenet, resnet20, resnet56, resnet110"),
        ({"data": "mnist"}, "--data", "valid are fashion-mnist, cifar10"),
        ({"data": "cifar10"}, "--data-dir", "the folder that holds it"),
        ({"workers": 0}, "--workers", "valid are 1 to 250"),
        ({"steps": 0}, "--steps", "valid are 1 to"),
        ({"batch": -1}, "--batch", "valid are 1 to"),
        ({"eval_every": 0}, "--eval-every", "valid are 1 to"),
        ({"start_iter": -1}, "--start-iter", "valid are 0 to"),
        ({"seed": 2**32}, "--seed", "valid are 0 to"),
        ({"learning_rate": math.nan}, "--lr", "valid are"),
        ({"learning_rate": 0.0}, "--lr", "valid are"),
        ({"codecs": ()}, "--codec", "no codec"),
        ({"codecs": ("raw", "raw")}, "--codec", "more than once"),
    ],
)
def test_values_that_no_run_can_have(change: dict[str, Any], option: str, said: str) -> None:
    settings.check(TrainSettings())
    with pytest.raises(SettingsError, match=said) as caught:
        settings.check(replace(TrainSettings(), **change))
    assert caught.value.option == option


def test_codecs_are_checked_by_the_core() -> None:
    for codec in (*settings.DEFAULT_CODECS, "ddp"):
        settings.check_codec(codec)
    with pytest.raises(SettingsError, match=r"3lc.*ddp"):
        settings.check_codec("4lc")
    with pytest.raises(SettingsError, match="s"):
        settings.check_codec("3lc:s=2.5")
    with pytest.raises(SettingsError) as caught:
        settings.check_codec("ddp", "--rules")  # ddp names a whole run, not the codec of a tensor
    assert caught.value.option == "--rules"


def test_settings_are_written_as_plain_values() -> None:
    rules = (Rule("fc*", "bf16", "pull"), Rule("*", "raw"))
    chosen = TrainSettings(bandwidth=None, data_dir=Path("/some/where"), rules=rules)
    written = json.loads(json.dumps(chosen.to_json()))
    assert list(written) == list(vars(chosen))
    assert written["data_dir"] == "/some/where"
    assert written["rules"] == [
        {"pattern": "fc*", "codec": "bf16", "direction": "pull"},
        {"pattern": "*", "codec": "raw", "direction": "both"},
    ]


def test_the_rate_falls_along_a_cosine_to_a_hundredth() -> None:
    rates = [learning_rate(step, 101, 0.1, 4) for step in range(101)]
    assert rates[0] == pytest.approx(0.4)
    assert rates[50] == pytest.approx((0.4 + 0.004) / 2)
    assert rates[100] == pytest.approx(0.004)
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(0, 1, 0.1, 4) == pytest.approx(0.4)
