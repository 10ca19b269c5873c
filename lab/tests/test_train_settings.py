"""The settings that `gradwire train` accepts, and its messages for others."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.torch.optimizer_list import parts_of
from gradwire_lab.cli import train
from gradwire_lab.train import checks, describe, models, options, rivals, settings, strategies
from gradwire_lab.train.schedule import learning_rate
from gradwire_lab.train.settings import Rule, Run, SettingsError, TrainSettings


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
    assert options.parse_rule(text) == rule


@pytest.mark.parametrize("text", ["", "fc", "=raw", "fc=", "fc=raw@", "fc=raw@both"])
def test_a_rule_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SettingsError, match="PATTERN=CODEC@pull"):
        options.parse_rule(text)


LOCAL: dict[str, Any] = {"compress": "updates", "every": 4}


@pytest.mark.parametrize(
    ("change", "option", "said"),
    [
        (
            {"model": "vgg"},
            "--model",
            "valid are lenet, mlp, resnet8, resnet20, resnet56, resnet110, gpt",
        ),
        ({"data": "mnist"}, "--data", "valid are fashion-mnist, cifar10, text"),
        ({"data": "cifar10"}, "--data-dir", "the folder that holds it"),
        ({"optimizer": "lion"}, "--optimizer", "valid are sgd, adam, adamw"),
        ({"schedule": "step"}, "--schedule", "valid are cosine, poly, constant"),
        ({"compress": "both"}, "--compress", "valid are gradients, updates"),
        ({"optimizer": "muon"}, "--optimizer", "the matrices of gpt's blocks, and lenet has none"),
        ({"model": "gpt"}, "--data", "gpt does not take fashion-mnist; valid are text"),
        ({"data": "text"}, "--data", "valid are fashion-mnist, cifar10"),
        ({"width": 8}, "--width", "lenet has no choice"),
        ({"model": "gpt", "data": "text", "width": 48}, "--width", "multiple of 32"),
        ({"model": "resnet20", "dropout": 0.1}, "--dropout", "resnet20 has no dropout"),
        ({"warmup": 401}, "--warmup", "valid are 0 to 400"),
        ({"momentum": 1.0}, "--momentum", "valid are 0 to 0.9999"),
        ({"optimizer": "adam", "momentum": 0.5}, "--momentum", "goes only with --optimizer sgd"),
        ({"dropout": 1.0}, "--dropout", "valid are 0 to 0.9"),
        ({"ema": 1.0}, "--ema", "valid are 0 to 0.99999"),
        ({"clip": math.nan}, "--clip", "valid are 0 to"),
        ({"every": 2}, "--compress", "local steps exchange updates"),
        ({"exclude_last": 6}, "--exclude-last", "6 is not valid; valid are 0 to 5"),
        ({"fragments": 2}, "--fragments", "goes only with --compress updates and --exchange shar"),
        (LOCAL | {"fragments": 5}, "--fragments", "take fragments=4 or fewer"),
        (LOCAL | {"delay": 5}, "--delay", "valid are 0 to 4"),
        (LOCAL | {"delay": 4, "mix": 0.5}, "--mix", "take delay=3 or less, or mix=0"),
        (LOCAL | {"outer": "adam"}, "--outer", "valid are average, sgd, nesterov"),
        (LOCAL | {"outer_lr": 0.5}, "--outer-lr", "goes only with --outer sgd or nesterov"),
        (LOCAL | {"outer": "sgd", "outer_lr": 0}, "--outer-lr", "the model would not change"),
        (LOCAL | {"residual_decay": 0}, "--residual-decay", "valid are 0.01 to 1"),
        (
            LOCAL | {"residual_decay": 0.9, "codecs": ("ddp", "raw")},
            "--residual-decay",
            "raw keeps no residual",
        ),
        (LOCAL | {"gate": "fp8", "codecs": ("raw",)}, "--gate", "valid is 'bfloat16'"),
        (LOCAL | {"gate": "bfloat16", "codecs": ("3lc",)}, "--codec", "3lc keeps a residual"),
        ({"gate": "bfloat16"}, "--gate", "goes only with --compress updates"),
        (LOCAL | {"fragments": 2, "codecs": ("auto:bits=1",)}, "--fragments", "a whole model"),
        ({"exchange": "server", "clip": 1.0}, "--clip", "goes only with"),
        ({"exchange": "sharded-optimizer", "compress": "updates"}, "--compress", "goes only"),
        ({"until": -0.5}, "--until", "valid are 0 to 1000"),
        ({"until": 85.0}, "--until", "85 is no accuracy: give a share, such as 0.85"),
        ({"staleness": 1}, "--staleness", "goes only with --exchange server"),
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
    checks.check(TrainSettings())
    with pytest.raises(SettingsError, match=said) as caught:
        checks.check(replace(TrainSettings(), **change))
    assert caught.value.option == option


def parsed(**given: Any) -> TrainSettings:
    """The settings of a command line with these options."""
    usual = {"model": "lenet", "exchange": "sharded", "every": 1, "steps": 400}
    return options.from_options(usual | given)


def test_only_links_with_a_bandwidth_have_a_latency() -> None:
    with pytest.raises(SettingsError) as caught:
        parsed(bandwidth="none", latency=5.0)
    assert caught.value.option == "--latency"
    chosen = parsed(bandwidth="10mbit", latency=5.0)
    assert chosen.links == "10mbit and 5 ms"


def test_defaults_follow_from_the_model_and_the_optimizer() -> None:
    usual = parsed()
    assert (usual.data, usual.batch, usual.optimizer) == ("fashion-mnist", 32, "sgd")
    assert (usual.compress, usual.warmup, usual.weight_decay) == ("gradients", 20, 1e-4)
    gpt = parsed(model="gpt")
    assert (gpt.data, gpt.batch, gpt.optimizer, gpt.compress) == ("text", 8, "adamw", "updates")
    assert (gpt.learning_rate, gpt.weight_decay, gpt.clip, gpt.width) == (3e-3, 0.1, 1.0, 128)
    assert parsed(optimizer="adam").weight_decay == 0.0
    assert parsed(every=4).compress == "updates"  # local steps
    warmups = [parsed(model="resnet20", steps=steps).warmup for steps in (40, 400, 4000)]
    assert warmups == [10, 50, 200]
    assert parsed(every=4, exchange="one-process", threads=1).compress == "gradients"
    hooked = parsed(model="gpt", exchange="one-process:pulls=gradients")
    assert (hooked.optimizer, hooked.compress, hooked.bandwidth) == ("adamw", "gradients", None)
    served = parsed(model="gpt", exchange="server")
    assert (served.compress, served.clip) == ("gradients", 0.0)
    assert parsed(optimizer="adamw", compress="gradients").compress == "gradients"


@pytest.mark.parametrize(
    ("exchange", "codecs"),
    [
        ("sharded", ("ddp", "torch:bf16", "3lc:s=1.00,coder=rice")),
        ("hierarchical:ranks=2", ("ddp", "torch:bf16", "3lc:s=1.00,coder=rice")),
        ("server", ("ddp", "torch:bf16", "3lc:s=1.00,coder=rice")),
        ("ring", ("ddp", "torch:bf16", "int8")),
        ("terngrad", ("ddp", "torch:bf16", "terngrad")),
        ("one-process", ("ddp", "3lc:s=1.00,coder=rice")),
    ],
)
def test_default_codecs_go_with_the_exchange(exchange: str, codecs: tuple[str, ...]) -> None:
    assert parsed(exchange=exchange).codecs == codecs


def test_local_steps_go_in_one_process() -> None:
    chosen = parsed(model="gpt", exchange="one-process", every=4, outer="nesterov", gate="bfloat16")
    assert chosen.takes_local_steps
    assert chosen.codecs == ("ddp", "topk:ratio=1,index=rice,ef=off")
    of_ranks = chosen.of_run(chosen.runs()[1]).of_ranks()
    assert (of_ranks.gate, of_ranks.outer, of_ranks.every) == ("bfloat16", "nesterov", 4)


def test_the_exchange_in_words_names_the_staleness_of_servers() -> None:
    said = describe.exchange(replace(TrainSettings(), exchange="server", staleness=2))
    assert said == "server, every step, servers: 1, staleness 2"


def test_every_option_is_in_one_group_of_the_help() -> None:
    grouped = [name for names in train._PANELS.values() for name in names]
    assert sorted(grouped) == sorted(settings.options())


def test_runs_are_all_codecs_with_each_seed() -> None:
    chosen = TrainSettings(codecs=("raw", "int8"), seed=3, seeds=2)
    runs = [Run("raw", 3), Run("int8", 3), Run("raw", 4), Run("int8", 4)]
    assert chosen.runs() == runs
    assert chosen.title(runs[3]) == "int8 seed 4"
    own = chosen.of_run(runs[3])
    assert (own.codecs, own.seed, own.runs()) == (("int8",), 4, [runs[3]])


def test_a_codec_for_each_way() -> None:
    assert settings.both_ways("3lc:s=1.5/int8") == ("3lc:s=1.5", "int8")
    assert settings.both_ways("raw") == ("raw", "raw")
    checks.check(replace(TrainSettings(), codecs=("3lc/int8",)))
    for bad in ("raw/", "/raw", "raw/4lc", "raw/raw/raw"):
        with pytest.raises(SettingsError, match="valid"):
            checks.check_codec(bad)


def test_codecs_are_checked_by_the_core() -> None:
    for codec in (*settings.DEFAULT_CODECS, *rivals.RIVALS, "torch:powersgd"):
        checks.check_codec(codec)
    with pytest.raises(SettingsError, match=r"3lc.*, auto .*ddp"):
        checks.check_codec("4lc")
    with pytest.raises(SettingsError, match="s"):
        checks.check_codec("3lc:s=2.5")
    with pytest.raises(SettingsError) as caught:
        checks.check_codec("ddp", "--rules")  # ddp names a whole run, not the codec of a tensor
    assert caught.value.option == "--rules"


@pytest.mark.parametrize(
    "codec",
    ["torch:int8", "torch:bf16:rank=2", "torch:powersgd:rank", "torch:powersgd:rank=2,rank=3"],
)
def test_another_rival_is_an_error_that_lists_the_valid(codec: str) -> None:
    with pytest.raises(SettingsError, match="valid are ddp, torch:bf16, torch:fp16, torch:powersg"):
        checks.check_codec(codec)


def test_options_of_powersgd() -> None:
    assert rivals.parse("torch:powersgd:start=3,rank=2") == rivals.Rival("torch:powersgd", 2, 3)
    for bad in ("rank=0", "start=1"):
        with pytest.raises(SettingsError, match="a rank from 1 and a start from 2"):
            checks.check_codec(f"torch:powersgd:{bad}")


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


RATES = TrainSettings(steps=101, learning_rate=0.1, workers=4)


def rates(**change: Any) -> list[float]:
    chosen = replace(RATES, **change)
    return [learning_rate(chosen, step) for step in range(chosen.steps)]


def test_the_rate_falls_along_a_cosine_to_a_hundredth() -> None:
    falling = rates()
    assert falling[0] == pytest.approx(0.4)
    assert falling[50] == pytest.approx((0.4 + 0.004) / 2)
    assert falling[100] == pytest.approx(0.004)
    assert falling == sorted(falling, reverse=True)
    assert rates(steps=1) == [pytest.approx(0.4)]


def test_the_rate_grows_while_it_warms_up() -> None:
    growing = rates(warmup=10)
    assert growing[:10] == pytest.approx([0.04 * step for step in range(1, 11)])
    assert growing[10:] == pytest.approx(rates(steps=91))
    assert rates(steps=4, warmup=4) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_other_schedules() -> None:
    assert rates(schedule="constant") == pytest.approx([0.4] * 101)
    root = rates(schedule="poly")
    assert (root[0], root[75], root[100]) == pytest.approx((0.4, 0.2, 0.0))


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"optimizer": "adamw", "loss_scale": 2.0}, "--loss-scale"),
        ({"clip": 1.0, "loss_scale": 2.0}, "--loss-scale"),
        ({"model": "gpt", "data": "text", "augment": "none"}, "--augment"),
    ],
)
def test_settings_that_do_not_fit_the_recipe(change: dict[str, Any], option: str) -> None:
    with pytest.raises(SettingsError) as error:
        checks.check(replace(TrainSettings(), **change))
    assert error.value.option == option


def test_the_rate_of_adam_does_not_grow_with_the_workers() -> None:
    assert rates(optimizer="adamw")[0] == pytest.approx(0.1)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    chosen = parsed(model="gpt", optimizer="muon", width=32)
    model = models.build("gpt", 256, 64, seed=0, width=32)
    muon, adamw = parts_of(strategies.local_optimizer(model, chosen))
    name_of = {id(p): name for name, p in model.named_parameters()}
    names = [
        {name_of[id(p)] for group in part.param_groups for p in group["params"]}
        for part in (muon, adamw)
    ]
    per_block = ("qkv", "out", "up", "down")
    assert names[0] == {f"blocks.{i}.{name}.weight" for i in range(3) for name in per_block}
    assert names[0] | names[1] == set(name_of.values())
    assert not names[0] & names[1]
    assert [part.param_groups[0]["weight_decay"] for part in (muon, adamw)] == [0.1, 0.1]
    assert adamw.param_groups[1]["weight_decay"] == 0.0


def test_the_outer_optimizer_goes_with_workers_in_one_process() -> None:
    way = {"exchange": "one-process", "every": 10, "outer": "nesterov"}
    local = parsed(model="gpt", codecs=["raw"], **way)
    assert local.takes_local_steps
    assert local.of_ranks().takes_local_steps
    summed = {"model": "gpt", "exchange": "one-process:pulls=gradients", "outer": "nesterov"}
    with pytest.raises(SettingsError, match="goes only with --compress updates"):
        parsed(**summed)
