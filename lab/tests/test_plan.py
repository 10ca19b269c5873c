"""`gradwire plan`: predictions, advice, and what it says about nonsense."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cli_runner
from gradwire import machine
from gradwire_lab.cli import plan as plan_command
from gradwire_lab.plan import assumed, measure, recorder
from gradwire_lab.plan.advise import MARGIN, make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.predict import DDP, cut_buckets, predict
from gradwire_lab.plan.profile import (
    CodecSpeed,
    Layer,
    MessageCosts,
    PlanError,
    Profile,
    read_profile,
)

FREE = CodecSpeed(0.0, 0.0, 32.0)


def profile_of(values: int = 4_000_000, layers: int = 8) -> Profile:
    """Layers of equal size, each with 10 ms of backward pass; codecs that take no time."""
    return Profile(
        model="made",
        workers=4,
        forward_seconds=0.04,
        rest_seconds=0.01,
        layers=tuple(
            Layer(f"layer{i}", (values // layers // 100, 100), 0.01) for i in range(layers)
        ),
        codecs={
            "raw": FREE,
            "bf16": replace(FREE, bits=16.0),
            "int8": replace(FREE, bits=8.0),
            "3lc:s=1.00,coder=rice": replace(FREE, bits=0.4, pull_bits=0.3),
        },
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A profile as `gradwire plan --model` makes it, but for its numbers."""
    path = tmp_path / "profile.json"
    replace(profile_of(), how={"steps": 20}).write(path)
    return path


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = replace(
        profile_of(), transport=MessageCosts(1e-4, 1e-9, 2e-4, 1e-9), how={"steps": 5}
    )
    profile.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


LAYER = {"name": "x", "dims": [1], "backward_seconds": 1}
SPEED = {"encode_seconds": 0, "decode_seconds": 0, "bits": 1}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "other"}, "its `kind` is other, not gradwire-profile"),
        ({"kind": None}, "`kind` is null, not a text"),
        ({"layers": []}, "no layers"),
        ({"layers": [LAYER, LAYER]}, "two of its layers have the name x"),
        ({"layers": {}}, "`layers` is an object, not a list"),
        ({"layers": [{"name": "x"}]}, "`dims` of layer 1 is missing"),
        ({"layers": ["x"]}, "layer 1 is a text, not an object"),
        ({"layers": [LAYER | {"dims": 3}]}, "`dims` of layer 1 is a whole number, not a list"),
        ({"layers": [LAYER | {"dims": [0]}]}, r"`dims` of layer x is \[0\], not a list of numbers"),
        ({"layers": [LAYER | {"dims": [2.5]}]}, "an item of `dims` of layer 1 is a number"),
        ({"layers": [LAYER | {"more": 1}]}, "`more` is no field of layer 1"),
        ({"forward_seconds": -1}, "`forward_seconds` is -1"),
        ({"forward_seconds": "1"}, "`forward_seconds` is a text, not a number"),
        ({"rest_seconds": math.nan}, "NaN is no JSON"),
        ({"rest_seconds": 10**400}, "`rest_seconds` is 1000"),
        ({"codecs": []}, "`codecs` is a list, not an object"),
        ({"codecs": {"raw": 3}}, "codec raw is a whole number, not an object"),
        ({"codecs": {"raw": {"encode_seconds": 0}}}, "`decode_seconds` of codec raw is missing"),
        ({"codecs": {"raw": SPEED | {"bits": None}}}, "`bits` of codec raw is null, not a number"),
        ({"codecs": {"raw": SPEED | {"bits": -3}}}, "`bits` of codec raw is -3"),
        ({"codecs": {"raw": SPEED | {"bits": 0}}}, "`bits` of codec raw is 0"),
        ({"codecs": {"raw": SPEED | {"pull_bits": -1}}}, "`pull_bits` of codec raw is -1"),
        ({"codecs": {"raw": SPEED | {"pull_bits": "1"}}}, "`pull_bits` of codec raw is a text"),
        ({"transport": {"byte_seconds": True}}, "`byte_seconds` of transport is true or false"),
        ({"transport": 4}, "`transport` is a whole number, not an object"),
        ({"how": "quickly"}, "`how` is a text, not an object"),
        ({"workers": "x"}, "`workers` is a text, not a whole number"),
        ({"workers": 0}, "`workers` is 0"),
        ({"unknown": 1}, "`unknown` is no field of a profile"),
    ],
)
def test_a_file_with_nonsense_is_no_profile(
    file: Path, change: dict[str, object], why: str
) -> None:
    document = json.loads(file.read_text()) | change
    file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=why) as error:
        read_profile(file)
    assert "--profile-out" in str(error.value), "it says how to make one"


@pytest.mark.parametrize("name", ["kind", "layers", "codecs", "workers", "forward_seconds"])
def test_a_field_that_is_missing_is_named(file: Path, name: str) -> None:
    document = json.loads(file.read_text())
    del document[name]
    file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=f"is no profile: `{name}` is missing; "):
        read_profile(file)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is cut off or no JSON .*"),
        (b'{"kind": "gradwire-prof', "it is cut off or no JSON .*"),
        (b"\xff\xfe", "it is cut off or no JSON .*"),
        (b"[1]", "it holds a list, not an object of JSON"),
        (b'{"kind": 1, "kind": 2}', "it is cut off or no JSON .a key occurs twice in an object."),
    ],
)
def test_a_file_that_is_no_json_is_no_profile(file: Path, content: bytes, why: str) -> None:
    file.write_bytes(content)
    with pytest.raises(PlanError, match=f"is no profile: {why}; "):
        read_profile(file)


def test_it_says_do_not_compress_where_it_does_not_pay() -> None:
    plan = make_plan(profile_of(), Cluster(4, 1e11))
    assert not plan.pays
    assert plan.advice().startswith("do not compress")
    slow = {"bf16": CodecSpeed(1e-6, 1e-6, 16.0)}
    advice = make_plan(replace(profile_of(), codecs=slow), Cluster(4, 1e11)).advice()
    assert advice.endswith("no codec is faster")
    # bf16 halves an exchange, but that is less than the margin of the step.
    profile = profile_of()
    fast = next(b for b in (1e8 * 1.1**i for i in range(200)) if not _pays(profile, b))
    assert (
        predict(profile, Cluster(4, fast), "bf16", "sharded", cut_buckets(profile)).seconds
        < predict(profile, Cluster(4, fast), DDP, DDP, cut_buckets(profile)).seconds
    )


def test_it_names_a_gain_that_is_too_small() -> None:
    plan = make_plan(profile_of(), Cluster(4, 2.5e10), ["bf16"])
    assert plan.predictions[0] is not plan.baseline
    assert "bf16 in" in plan.advice()
    assert "a gain below 10%" in plan.advice()


def _pays(profile: Profile, bandwidth: float) -> bool:
    return make_plan(profile, Cluster(4, bandwidth), ["bf16"]).pays


def test_of_equally_fast_codecs_it_takes_the_gentlest() -> None:
    profile = profile_of()
    for bandwidth in (1e7, 1e8, 1e9, 3e9):
        plan = make_plan(profile, Cluster(4, bandwidth))
        assert plan.pays
        assert plan.choice.seconds <= (1 + MARGIN) * plan.predictions[0].seconds
        for other in plan.predictions:
            if other.bits > plan.choice.bits:
                assert other.seconds > (1 + MARGIN) * plan.predictions[0].seconds
    choices = [make_plan(profile, Cluster(4, 1e7 * 1.3**i)).choice for i in range(36)]
    bits = [choice.bits for choice in choices]
    assert bits == sorted(bits), "the faster the network, the more bits"
    assert {"3lc:s=1.00,coder=rice", "int8", DDP} <= {choice.codec for choice in choices}


def test_a_ring_is_not_for_sparse_codecs_unless_asked_for() -> None:
    profile = profile_of()
    profile = replace(
        profile, codecs={**profile.codecs, "qgd": replace(FREE, bits=0.1), "small": FREE}
    )
    plan = make_plan(profile, Cluster(8, 1e8))
    rings = {p.codec for p in plan.predictions if p.exchange == "ring"}
    assert rings == {"raw", "bf16", "int8"}
    asked = make_plan(profile_of(), Cluster(8, 1e8), ["3lc:s=1.00,coder=rice"], ["ring"])
    assert [p.exchange for p in asked.predictions] == ["ring", DDP]


def test_the_exchange_terngrad_takes_its_codec_alone() -> None:
    profile = profile_of()
    profile = replace(profile, codecs={"bf16": FREE, "terngrad": replace(FREE, bits=2.0)})
    plan = make_plan(profile, Cluster(8, 1e8), exchanges=["terngrad", "sharded"])
    found = {(p.codec, p.exchange) for p in plan.predictions}
    pairs = {("terngrad", "terngrad"), ("terngrad", "sharded"), ("bf16", "sharded"), (DDP, DDP)}
    assert found == pairs


# The command


def test_the_command_prints_a_table_and_an_advice(file: Path) -> None:
    result = cli_runner.run("plan", "--profile", file, "--bandwidth", "100mbit", "--ranks", 8)
    assert result.code == 0, result.err
    assert "take codec 3lc:s=1.00,coder=rice with exchange" in result.out
    document = cli_runner.run(
        *("plan", "--profile", file, "--bandwidth", "100mbit", "--ranks", 8, "--json")
    ).json
    seconds = [prediction["seconds"] for prediction in document["predictions"]]
    assert seconds == sorted(seconds)
    assert document["pays"]
    assert document["choice"]["codec"] == "3lc:s=1.00,coder=rice"
    assert document["cluster"]["burst"] == 0
    shaped = cli_runner.run(
        *("plan", "--profile", file, "--bandwidth", "100mbit", "--ranks", 8, "--json"),
        *("--burst", 12_500),
    ).json
    assert shaped["cluster"] == document["cluster"] | {"burst": 12_500}
    fastest, before = shaped["predictions"][0], document["predictions"][0]
    assert fastest["wire_seconds"] < before["wire_seconds"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--bandwidth", "1gbit"], "--profile FILE"),
        (["--bandwidth", "1gbit"], "or --values 7B --compute 800ms"),
        (["--values", "7B", "--bandwidth", "1gbit"], "--values and --compute go together"),
        (["--profile", "FILE", "--compute", "1s"], "--values and --compute go together"),
        (["--profile", "FILE", "--values=7B", "--compute=1s"], "or one of --profile and --model"),
        (["--values", "7B", "--compute", "1s", "--workers=2"], "--workers goes with --model"),
        (["--values", "7B", "--compute", "1s"], "--bandwidth 100mbit"),
        (["--values", "7T", "--compute", "1s"], "--values: 7T is no number from 1, such as"),
        (["--values", "1.5", "--compute", "1s"], "1.5 is no number from 1"),
        (["--values", "-7B", "--compute", "1s"], "-7B is no number from 1"),
        (["--values", "7B", "--compute", "800"], "--compute: 800 is no time above 0 with its un"),
        (["--values", "7B", "--compute", "0ms"], "0ms is no time above 0"),
        (["--values", "7B", "--compute", "1h"], "such as 800ms, 1.5s or 2min"),
        (["--profile", "FILE", "--model", "lenet"], "give one of --profile and --model"),
        (["--profile", "FILE", "--workers", "4"], "--workers goes with --model"),
        (["--profile", "FILE", "--profile-steps=20"], "--profile-steps goes with --model"),
        (
            ["--model", "lenet", "--workers", "0", "--profile-out", "z.json"],
            "greater than or equal to 1",
        ),
        (["--model", "lenet", "--ranks", "0", "--profile-out", "z.json"], "cannot be 0 ranks"),
        (["--model", "lenet", "--codec", "foo", "--profile-out", "z.json"], "unknown codec"),
        (["--profile", "FILE"], "--bandwidth 100mbit"),
        (["--profile", "missing.json", "--bandwidth", "1gbit"], "missing.json"),
        (["--profile", "FILE", "--bandwidth", "0mbit"], "between 64kbit and 100gbit"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--ranks", "1"], "1 rank exchanges nothing"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--ranks=-3"], "cannot be -3 ranks: give"),
        (
            ["--profile", "FILE", "--bandwidth", "1gbit", "--latency", "-1"],
            "--latency -1: a message takes 0 m",
        ),
        (
            [*("--profile", "FILE", "--bandwidth", "1gbit"), "--ranks=8", "--ranks-per-machine=3"],
            "divides",
        ),
        (
            ["--profile", "FILE", "--bandwidth", "1gbit", "--codec", "onebit"],
            "again with --codec onebit",
        ),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--codec", "foo"], "terngrad, stoch3"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--codec", "3lc:s=9"], "number in [1, 2)"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--exchange", "star"], "hierarchical"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--local-bandwidth=9"], "--local-bandwidth"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--burst=-1"], "--burst -1: a link passes 0"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--burst=10000000000000"], "up to 10000000000"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--burst=lots"], "as an integer"),
        (["--profile", "FILE", "--bandwidth=none", "--burst=5000"], "or leave --burst out"),
        (["--model", "lenet", "--profile-out", "no/folder/x.json"], "no/folder/x.json"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--exchange=tree", "-c", "bf16"], "sharded"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--exchange=ddp", "-c", "bf16"], "sharded"),
        (
            ["--profile", "FILE", "--bandwidth=1gbit", "--exchange=terngrad", "-c", "bf16"],
            "takes the codec terngrad, not bf16",
        ),
        (["--profile", "FILE", "--bandwidth=1gbit", "--exchange=terngrad"], "--codec terngrad"),
        (["--model", "lenet", "--workers", "1", "--bandwidth", "1gbit"], "give --ranks"),
    ],
)
def test_nonsense_is_an_error_that_says_what_it_needs(
    file: Path, arguments: list[str], needed: str
) -> None:
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    result = cli_runner.run("plan", *given)
    assert result.code in (1, 2)
    said = " ".join(result.err.replace("│", " ").split())
    assert needed in said
    assert "Traceback" not in said


def test_ranks_share_machines_as_in_the_profile_unless_their_number_is_given(file: Path) -> None:
    words = ["plan", "--profile", file, "--bandwidth", "1gbit", "--ranks-per-machine", 4, "--json"]
    assert cli_runner.run(*words).json["cluster"]["ranks"] == 4
    refused = cli_runner.run(*words, "--ranks", 6)
    assert (refused.code, "6 ranks cannot be 4 on each machine" in refused.err) == (1, True)


def test_a_model_that_is_not_here_is_planned_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = MessageCosts(1e-4, 1e-10, 1e-4, 1e-10)
    monkeypatch.setattr(measure, "measure_transport", lambda *_: measured)
    arguments = [
        *("plan", "--values", "7B", "--compute", "800ms", "--bandwidth", "10gbit"),
        *("--ranks", 8, "-c", "bf16", "-c", "int8"),
    ]
    made = cli_runner.run(*arguments, "--json").json
    assert (made["values"], made["compute_seconds"]) == (7_000_000_000, pytest.approx(0.8))
    by_way = {(p["codec"], p["exchange"]): p for p in made["predictions"]}
    half = by_way["bf16", "sharded"]
    assert half["bits"] == pytest.approx(16, abs=0.01)
    assert 1e-11 < half["codec_seconds"] / 7e9 < 1e-7, "the codecs are measured"
    assert by_way[DDP, DDP]["wire_seconds"] == pytest.approx(2 * 7 / 8 * 28e9 * 8 / 1e10, rel=0.1)
    shown = cli_runner.run(*arguments)
    assert shown.code == 0, shown.err
    assert "7,000,000,000 values, 8 ranks on 8 machines; a step computes 800 ms" in shown.out
    assert "assumed: a third of the step is the forward pass" in shown.out
    assert "messages cost nothing" not in shown.out
    # Without PyTorch nobody knows what messages cost.
    monkeypatch.setattr(assumed, "find_spec", lambda _: None)
    assert "In doubt: in the profile gradwire's messages cost" in cli_runner.run(*arguments).out


@pytest.mark.parametrize("values", [1, 4095, 270_001, 25_600_000, 7_000_000_000, 10**12])
def test_the_layers_of_an_assumed_model_have_all_its_values(values: int) -> None:
    layers = assumed._equal_layers(values, 2.0)
    assert sum(layer.numel for layer in layers) == values
    assert sum(layer.backward_seconds for layer in layers) == pytest.approx(2.0)
    assert len(layers) <= 1024
    assert len(layers) >= 8 or values < 8 * 4096


def test_doubts_stand_in_the_advice() -> None:
    """A meter that found nothing made `raw` look faster than DDP."""
    found_nothing = replace(
        profile_of(), transport=MessageCosts(0.0, 0.0, 0.05, 0.0), how={"steps": 20}
    )
    plan = make_plan(found_nothing, Cluster(4, 1e10), ["raw"])
    assert plan.choice.codec == "raw"
    assert "1.33 times as fast" not in plan.advice().partition("In doubt: ")[2]
    assert "In doubt: in the profile gradwire's messages cost nothing" in plan.advice()
    assert plan.advice().endswith("measure the model again, on an idle machine")
    lacking = make_plan(profile_of(), Cluster(4, 1e7))
    assert lacking.advice().endswith("`gradwire plan --model` made on that machine")
    measured = replace(profile_of(), transport=MessageCosts(1e-5, 0.0, 1e-5, 0.0))
    assert make_plan(measured, Cluster(4, 1e7)).doubts == ()
    # DDP is the one that looks too fast.
    slow = replace(profile_of(), transport=MessageCosts(1e-3, 0.0, 0.0, 0.0))
    plan = make_plan(slow, Cluster(4, 1e11))
    assert not plan.pays
    assert "DDP's messages cost nothing" in plan.advice()


def test_a_profile_that_nobody_measured_gets_a_codec_by_hand(file: Path) -> None:
    profile_of().write(file)
    for given, codec in ((["--codec", "onebit"], "onebit"), (["--exchange=terngrad"], "terngrad")):
        result = cli_runner.run("plan", "--profile", file, "--bandwidth", "1gbit", *given)
        assert result.err.endswith(f"add {codec} to `codecs` of the file\n")
        assert result.code == 1


def test_a_busy_machine_is_said(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its profile is used, and in every plan with it."""
    cores = len(os.sched_getaffinity(0))
    made = tmp_path / "made.json"
    for load, is_busy in ((cores / 2, False), (cores / 2 + 0.25, True)):
        how = {"load_average": load, "machine": {"cores": cores}}
        measured = replace(profile_of(), how=how)
        monkeypatch.setattr(plan_command, "load_average", lambda load=load: load)
        monkeypatch.setattr(measure, "measure_profile", lambda *_, measured=measured: measured)
        result = cli_runner.run("plan", "--model", "lenet", "--workers", 1, "--profile-out", made)
        assert result.code == 0, result.err
        assert ("keeps this machine busy" in result.err) == is_busy
        said = cli_runner.run("plan", "--profile", made, "--bandwidth", "1gbit").out
        assert ("its times are too long" in said) == is_busy
        assert ("In doubt: other work kept the machine busy" in said) == is_busy
    assert machine.load_average() is not None


def test_a_profile_has_the_dtype_of_each_gradient() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    names = [name for name, _ in model.named_parameters()]
    marks = {recorder._FORWARD: 1.0, recorder._END: 3.0}
    marks |= {recorder._GRADIENT + name: 2.0 for name in names}
    found = recorder.profile_of("m", model, [[marks] * 4])
    assert {layer.name: layer.bits for layer in found.layers} == {
        name: 16 if name.startswith("1") else 32 for name in names
    }
