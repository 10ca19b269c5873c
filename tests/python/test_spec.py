"""Executes the examples of spec/format.md, with the plain Python reference and with gradwire."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import gradwire
from golden import ROOT, array, common, encoder, payloads, spec

PAGE = (ROOT / "spec" / "format.md").read_text()


@dataclass
class Example:
    """One ```example block. Values are the bytes of float32."""

    codec: str = ""
    input: bytes = b""
    data: bytes = b""
    values: bytes = b""
    packet: dict[str, str] = field(default_factory=dict)
    frames: list[tuple[str, int, bytes]] = field(default_factory=list)
    report: dict[str, str] = field(default_factory=dict)


def numbers(text: str) -> bytes:
    return common.to_bytes([common.f32(float(word)) for word in text.split()])


def pairs(text: str) -> dict[str, str]:
    return dict(item.split("=") for item in text.split())


def read_example(block: str) -> Example:
    example, key = Example(), ""
    for line in block.splitlines():
        key, rest = line[:8].strip() or key, line[8:].partition("#")[0].strip()
        if key == "codec":
            example.codec = rest
        elif key == "input":
            example.input = numbers(rest)
        elif key == "bytes":
            example.data += bytes.fromhex(rest)
        elif key == "values":
            example.values = numbers(rest)
        elif key == "packet":
            example.packet = pairs(rest)
        elif key == "report":
            example.report = pairs(rest)
        elif key == "frame":
            codec, n, _, values = rest.split(maxsplit=3)
            example.frames.append((codec, int(n.removeprefix("n=")), numbers(values)))
        else:
            raise AssertionError(f"unknown line in an example: {line!r}")
    return example


EXAMPLES = [read_example(block) for block in re.findall(r"```example\n(.*?)```", PAGE, re.DOTALL)]
FRAMES = [example for example in EXAMPLES if not example.packet]
PACKETS = [example for example in EXAMPLES if example.packet]


def test_the_page_has_an_example_of_every_codec_and_of_both_packets() -> None:
    named = {example.codec.partition(":")[0] for example in FRAMES}
    assert named == {codec["name"] for codec in gradwire.codecs()}
    assert len(FRAMES) >= 6
    assert sorted(bool(example.report) for example in PACKETS) == [False, True]


@pytest.mark.parametrize("example", FRAMES, ids=lambda example: example.codec)
def test_frame_example(example: Example) -> None:
    assert spec.decode_frame(example.data) == example.values
    assert encoder.encode_frame(example.input, example.codec) == example.data
    assert gradwire.decode(example.data).tobytes() == example.values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradwire.NonFiniteWarning)
        assert gradwire.encode(array(example.input), example.codec) == example.data
    told = gradwire.inspect(example.data)
    assert told["codec"].partition(":")[0] == example.codec.partition(":")[0]
    assert told["numel"] == len(example.values) // 4


@pytest.mark.parametrize("example", PACKETS, ids=["frames", "marker"])
def test_packet_example(example: Example) -> None:
    packet = spec.parse_packet(example.data)
    assert encoder.encode_packet(packet) == example.data
    fields = {
        "direction": ("push", "pull")[packet.direction],
        "source": str(packet.source),
        "step": str(packet.step),
        "layout_digest": f"{packet.layout_digest:016x}",
    }
    assert fields == example.packet
    assert example.frames == [
        (payloads.CODECS[frame.codec].NAME, frame.n, spec.decode(frame)) for frame in packet.frames
    ]
    report = {key: str(value) for key, value in vars(packet.report or object).items()}
    assert not example.report or report == example.report

    told = gradwire.inspect(example.data)
    assert told["kind"] == "packet"
    assert told["direction"] == example.packet["direction"]
    assert [told["source"], told["step"]] == [packet.source, packet.step]
    assert told["packet_bytes"] == len(example.data)
    assert bool(told["non_finite"]) == bool(example.report)
    for frame, entry in zip(packet.frames, told["frames"], strict=True):
        assert entry["codec"].partition(":")[0] == payloads.CODECS[frame.codec].NAME
        assert (entry["numel"], entry["payload_bytes"]) == (frame.n, len(frame.payload))


def test_every_codec_is_in_the_contents_and_in_the_table_of_residuals() -> None:
    residuals = PAGE.partition("| codec | new residual |")[2].partition("\n\n")[0]
    for codec in gradwire.codecs():
        name = codec["name"]
        assert f"[{name}](#{name})" in PAGE.partition("## Introduction")[0]
        takes_feedback = any("on" in p["values"].split("|") for p in codec["parameters"])
        listed = re.search(rf"^\|[^|]*\b{name}\b", residuals, re.MULTILINE)
        assert takes_feedback == (listed is not None), name


def test_codec_numbers_of_the_page() -> None:
    section = PAGE.partition("## Codecs\n")[2].partition("### raw")[0]
    table = re.findall(r"^\| (\d+) \| (\w+) \|", section, re.MULTILINE)
    assert {int(number): name for number, name in table} == {
        number: codec.NAME for number, codec in payloads.CODECS.items()
    }


def test_defaults_of_the_page_are_those_of_the_registry() -> None:
    section = PAGE.partition("## Codec strings\n")[2].partition("## Packet")[0]
    table = re.findall(r"^\| (\w+) \| (.*) \|$", section, re.MULTILINE)
    keys = {
        name: dict(item.split("=") for item in re.findall("`(.*?)`", row))
        for name, row in table
        if name != "codec"
    }
    assert keys == {
        codec["name"]: {
            parameter["name"]: parameter["default"]
            for parameter in codec["parameters"]
            if parameter["default"] != "by bits"
        }
        for codec in gradwire.codecs()
    }


def test_status_names_of_the_page_are_those_of_the_reference() -> None:
    table = PAGE.partition("## Status codes")[2].partition("## Limits")[0]
    names = set(re.findall(r"^\| \d+ \| `(\w+)` \|", table, re.MULTILINE))
    source = (ROOT / "spec" / "reference.py").read_text()
    used = set(re.findall(r"\"([a-z]+_?[a-z]+)\", f?\"", source))
    assert len(used) == 10
    assert used <= names


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "spec" / "reference.py"
    return subprocess.run(
        [sys.executable, script, path], capture_output=True, text=True, check=False
    )


def test_the_reference_prints_a_frame_and_a_packet(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(next(frame.data for frame in FRAMES if frame.codec.startswith("3lc")))
    done = run_script(path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("3lc, float32, n 12")
    assert done.stdout.splitlines()[11:] == ["1.75", "0"]
    path.write_bytes(PACKETS[0].data)
    done = run_script(path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("packet, direction 0, source 1, step 7")
    assert done.stdout.splitlines()[-1] == "0.5"


def test_the_reference_says_why_it_refuses(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(FRAMES[0].data[:-1])
    done = run_script(path)
    assert done.returncode == 1
    assert done.stderr.startswith("refused, truncated")
