"""The `gradwire` command as a user sees it: help, exit code, stdout, stderr."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import gradwire
from cli_runner import run
from gradwire._core import codec_names
from gradwire.cli.app import LAB_COMMANDS, _installed, list_commands, make_command

# The command as a whole


def test_help_lists_every_command_in_order() -> None:
    out = run("--help").out
    assert set(LAB_COMMANDS) < set(list_commands())
    places = [out.index(f"│ {name} ") for name in list_commands()]
    assert places == sorted(places)


@pytest.mark.parametrize("command", [name for name in list_commands() if name != "train"])
def test_each_command_explains_itself_and_has_json(command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert f"gradwire {command}" in result.out
    assert "--json" in result.out


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], {"torch", "matplotlib", "safetensors"}),  # loads all commands
        (["info"], {"numpy", "rich", "gradwire_lab", "torch"}),
    ],
)
def test_a_command_loads_no_package_that_it_does_not_use(
    arguments: list[str], unneeded: set[str]
) -> None:
    code = (
        "import atexit, sys; from gradwire.cli import main; "
        f"atexit.register(lambda: print(*({unneeded} & set(sys.modules)), file=sys.stderr)); "
        f"main({arguments})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gradwire" in done.stdout
    assert done.stderr.split() == []


def test_commands_of_the_laboratory_say_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["gradwire.cli.app"], "entry_points", lambda group: ())
    _installed.cache_clear()
    try:
        for command in LAB_COMMANDS:
            done = run(command, "--help")
            assert done.code == 1
            assert done.err == (
                f"gradwire: error: `gradwire {command}` needs the laboratory: gradwire-lab not "
                "installed; in gradwire's source tree `pip install ./lab` brings it\n"
            )
        assert not any(f"│ {command} " in run("--help").out for command in LAB_COMMANDS)
    finally:
        _installed.cache_clear()


def test_version() -> None:
    assert run("--version").out == f"gradwire {gradwire.__version__}\n"


def test_unknown_command_and_option_are_usage_errors() -> None:
    assert run("comprss").code == 2
    result = run("compress", "x.npy", "--codek", "raw")
    assert result.code == 2
    assert "--codek" in result.err


@pytest.mark.parametrize("command", list_commands())
def test_an_option_that_takes_one_value_is_refused_when_it_is_given_twice(command: str) -> None:
    options = [
        one.opts[0]
        for one in make_command(command).params
        if one.opts[0].startswith("-") and not one.multiple and not one.is_flag
    ]
    assert options or command in ("codecs", "inspect", "info")
    for option in options:
        result = run(command, option, "1", f"{option}=2")
        assert result.code == 2, option
        said = " ".join(result.err.replace("│", " ").split())
        assert "it is given 2 times and takes one value" in said, option
        assert option in said


def test_numbers_of_threads_that_cannot_be_are_usage_errors() -> None:
    """One beyond 32 bits ended in a traceback."""
    options = {name: [one.opts[0] for one in make_command(name).params] for name in list_commands()}
    commands = [name for name in options if "--threads" in options[name]]
    assert {"compress", "fold", "bench", "train"} <= set(commands)
    for command, threads in itertools.product(commands, [-1, 0, 257, 2**40]):
        result = run(command, "--threads", threads)
        assert (result.code, "--threads" in result.err) == (2, True), (command, threads)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("bench -c q", ["qgd", "qsgd"]),
        ("compress x.npy --codec ra", ["raw"]),
        ("simulate -c 3", ["3lc"]),
        ("simulate --exchange r", ["ring"]),
        ("plan -c bf16 -c in", ["int8", "inceptionn"]),
        ("plan --exchange b", ["broadcast"]),
        ("train --codec ter", ["terngrad"]),
        ("train --exchange h", ["hierarchical"]),
    ],
)
def test_a_shell_completes_codecs_and_exchanges(
    line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_GRADWIRE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"gradwire {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    assert sorted(run().out.split()) == sorted(offered)


# codecs, info


def test_codecs() -> None:
    document = run("codecs", "--json").json
    assert document == {"names": codec_names(), "codecs": gradwire.codecs()}
    usual = run("codecs").out
    assert re.findall(r"^ ([\w-]+) +[\d.]+ ", usual, re.MULTILINE) == [
        *("small", "safe", "half-byte", "bf16", "raw")
    ]
    for known in codec_names():
        assert known["codec"] in usual
    table = run("codecs", "--all").out
    assert "auto:bits=1" in table
    bits = dict(re.findall(r"^ (\w+) +([\d.]+)  (?:on|off) ", table, re.MULTILINE))
    assert set(bits) == {codec["name"] for codec in gradwire.codecs()}
    assert [float(bits[name]) for name in ("raw", "bf16", "int8")] == [32, 16, 8]
    assert 0.1 < float(bits["3lc"]) < 1.6
    for codec in gradwire.codecs():
        assert codec["name"] in table
        for parameter in codec["parameters"]:
            assert parameter["help"][:20] in table


def test_the_package_is_the_command() -> None:
    called = subprocess.run(
        [sys.executable, "-m", "gradwire", "--version"], capture_output=True, text=True, check=True
    )
    assert called.stdout == f"gradwire {gradwire.__version__}\n"


def test_info() -> None:
    report = run("info", "--json").json
    assert report["build"]["version"] == gradwire.__version__
    assert report["build"]["simd_targets"] == gradwire.simd_targets()
    assert report["packages"]["numpy"] == np.__version__
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    text = run("info").out
    assert report["machine"]["cpu"] in text
    assert ", ".join(gradwire.simd_targets()) in text


# bench

SHORT_BENCH = ("--size", "2k", "--seconds", "0.01", "--data", "synthetic")


def test_bench_measures_what_was_asked() -> None:
    report = run(
        *("bench", *SHORT_BENCH),
        *("--codec", "raw", "--codec", "3lc:s=1.00", "--target", "all", "--threads", "1", "--json"),
    ).json
    asked = {
        (codec, 2000, operation, target, 1)
        for codec in ("raw", "3lc:s=1.00")
        for operation in ("encode", "decode_add")
        for target in gradwire.simd_targets()
    }
    rows = report["results"]
    names = ("codec", "numel", "operation", "target", "threads")
    assert {tuple(row[name] for name in names) for row in rows} == asked
    for row in rows:
        assert row["gb_per_s"] == pytest.approx(4e-9 * row["numel"] / row["seconds"])
        assert row["share_of_memcpy"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"])
        if row["codec"] == "raw":
            assert row["bits_per_value"] == pytest.approx(32 + 8 * 32 / row["numel"])
    assert report["data"].startswith("synthetic: x = ")
    assert {"compiler", "flags", "version"} <= set(report["build"])
    assert report["machine"]["cpu"]


def test_bench_prints_a_table() -> None:
    out = run("bench", *SHORT_BENCH, "-c", "bf16", "--operation", "encode").out
    rows = [line.split() for line in out.splitlines() if line.startswith(" bf16 ")]
    assert [row[:5] for row in rows] == [
        ["bf16", gradwire.simd_targets()[0], "2,000", threads, "16.1"] for threads in "12"
    ]
    assert [row[9:11] for row in rows] == [["-", "-"]] * 2  # decode_add was not asked for
    assert "of memcpy" in out
    assert out.startswith("machine ")
    assert "In brackets" not in out  # too small for a parallel memcpy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--size 0", "--size: 0 is no number from 1 to 2,147"),
        ("--size 1.5", "--size: 1.5 is no number from 1 to 2,147"),
        ("--size many", "--size: many is no number from 1 to 2,147"),
        ("--size 3G", "--size: 3G is no number from 1 to 2,147"),
        ("--size nan", "--size: nan is no number from 1 to 2,147"),
        ("--operation decode", "valid are encode"),
        ("--target sse9", "scalar"),
        ("--codec 3lc:s=3", "[1, 2)"),
        ("--codec zip", "3lc"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(arguments: str, message: str) -> None:
    result = run("bench", *arguments.split())
    assert result.code == 2
    assert message in result.err


def test_bench_needs_its_data() -> None:
    result = run("bench", "--data", "nothing.safetensors")
    assert result.code == 1
    assert "nothing.safetensors" in result.err


def test_running_out_of_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust() -> None:
        raise MemoryError

    monkeypatch.setattr("gradwire.codecs", exhaust)
    result = run("codecs")
    assert result.code == 1
    assert result.err == "gradwire: error: out of memory\n"


def test_bench_stops_when_a_codec_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_into = gradwire.decode_into

    def decode_wrongly(frame: bytes, out: Any, **options: Any) -> None:
        decode_into(frame, out, **options)
        out += options.get("target") == "scalar"

    monkeypatch.setattr("gradwire.decode_into", decode_wrongly)
    result = run("bench", *SHORT_BENCH, "--codec", "raw")
    assert result.code == 1
    assert "not the values of the scalar target" in result.err
    assert result.out.count("raw") == result.out.count("--codec raw")
