"""Executes the examples of spec/format.md, with the plain Python reference and with gradwire."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash

import gradwire
from golden import ROOT, array, common, container, encoder, payloads, spec
from gradwire._core import checksum32
from gradwire.tensor_dtypes import SAFETENSORS_BITS, bits_of

PAGE = (ROOT / "spec" / "format.md").read_text()
PHILOX = PAGE.partition("## Random words")[2].partition("A word w stands")[0]
XXH3 = PAGE.partition("XXH3-64 with seed 0")[2].partition("It detects")[0]


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


def test_codec_strings_of_the_page_are_those_of_the_registry() -> None:
    section = PAGE.partition("## Codec strings\n")[2].partition("## Packet")[0]
    table = re.findall(r"^\| (\w+) \| (.*) \|$", section, re.MULTILINE)
    keys = {
        name: [item.partition(": ") for item in row.split("; ") if item]
        for name, row in table
        if name != "codec"
    }
    assert {
        name: {key.strip("`"): values.replace("`", "").replace(", ", "|") for key, _, values in row}
        for name, row in keys.items()
    } == {
        codec["name"]: {
            parameter["name"]
            + ("" if parameter["default"] == "by bits" else f"={parameter['default']}"): (
                parameter["values"].replace(", ", "|")
            )
            for parameter in codec["parameters"]
        }
        for codec in gradwire.codecs()
    }


# Rules of the section that follow the table: texts, and the texts that mean the same; "": refused.
@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("3lc:s=1.75", "3lc:s=175e-2"),
        ("3lc:s=+1.75", ""),
        ("3lc:s=1.99999999", ""),  # the nearest f32 is 2
        ("3lc: s=1.75", ""),
        ("3lc:s=1.75,s=1.75", ""),
        ("3LC", ""),
        ("int8:bucket=whole", ""),
        ("3lc:bucket=4294967295", "3lc:bucket=4294967295"),
        ("3lc:bucket=0", ""),
        ("int8:bucket=4294967296", ""),
        ("onebit:bucket=4294967296", ""),
        ("qsgd:bits=8", "qsgd:levels=127"),
        ("qsgd:bits=8,levels=127", ""),
        ("terngrad:coder=zre", ""),
        ("terngrad:coder=none", "terngrad"),
        ("terngrad:pack=trits5,coder=zre", "terngrad:coder=zre,pack=trits5"),
        ("bf16:residual=bf16", ""),
        ("bf16:ef=on,residual=f32", "bf16:ef=on"),
    ],
)
def test_rules_of_codec_strings(text: str, same: str) -> None:
    if same:
        assert gradwire.Compressor(text, 0).codec == gradwire.Compressor(same, 0).codec
    else:
        with pytest.raises(gradwire.GradwireError):
            gradwire.Compressor(text, 0)


def test_dtypes_of_containers_of_the_page() -> None:
    section = PAGE.partition("### Dtypes of containers\n")[2].partition("### Order")[0]
    rows = re.findall(r"^\| (\w*) ?\| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    first_of_npy = [kind for kind, _, _ in rows].index("npy")
    listed = {
        name: int(size.split()[0]) * (1 if "bit" in size else 8)
        for _, names, size in rows[:first_of_npy]
        for name in re.findall("`(.+?)`", names)
    }
    assert listed == SAFETENSORS_BITS == container.SAFETENSORS_BITS
    numbers = re.findall("`([iufc][0-9]+)`", section)
    units = re.findall("`([A-Za-z]{1,2})`", section.partition("`unit` is one of")[2])
    known = {"|b1": 8, "|i1": 8, "|u1": 8, "|S0": 0, "|V7": 56, "|S2147483647": 8 * (2**31 - 1)}
    for order in "<>":
        known |= {f"{order}{number}": 8 * int(number[1:]) for number in numbers}
        known |= {f"{order}{letter}8": 64 for letter in "Mm"}
        known |= {f"{order}M8[{unit}]": 64 for unit in units}
        known |= {f"{order}m8[1234567890{unit}]": 64 for unit in units}
        known |= {f"{order}U0": 0, f"{order}U3": 96}
    assert (len(numbers), len(units)) == (13, 13)
    unknown = ["", "F33", "a3", "int", "f4", "=f4", "<f4 ", "<i1", "|b2", "<b1", "<c4", "<f12"]
    unknown += ["|O", "|S2147483648", "|S01", "<S3", "|U3", "<M8[generic]", "<M8[0s]", "<M8[]"]
    unknown += ["<f\u0664", "F32", "|S", "<M8[12345678901s]"]
    for dtype in [*known, *unknown]:
        assert bits_of("npy", dtype) == container.bits_of("npy", dtype) == known.get(dtype), dtype
    for dtype, bits in known.items():
        if re.fullmatch("[<>][iucf].*|.*[Mm].*", dtype):
            assert (np.dtype(dtype).str, 8 * np.dtype(dtype).itemsize) == (dtype, bits)


def test_check_values_of_the_page() -> None:
    """Philox, XXH3-64 and CRC-32, here and in gradwire."""
    words = [int(word, 16) for word in re.findall(r"\b[0-9a-f]{8}\b", PHILOX)]
    for line in re.findall(r"^\| ([0-9a-f]{8} .*) \|$", PHILOX, re.MULTILINE):
        counter, key, result = ([int(w, 16) for w in part.split()] for part in line.split(" | "))
        assert list(common.philox(tuple(counter), *key)) == result
    drawn = words[-5:]
    assert common.Draws(seed=1, draw_stream=2, step=3).words(5) == drawn
    # stoch3 sends a value that is above its word, and not one that is as large.
    numbers = [word >> 8 for word in drawn]
    for more in (0, 1):
        values = [(number + more) * 2.0**-24 for number in numbers] + [1.0]
        frame = gradwire.encode(array(common.to_bytes(values)), "stoch3", seed=1, stream=2, step=3)
        assert gradwire.decode(frame)[:5].tolist() == [float(more)] * 5

    nothing, nine, low = re.findall(r"\b[0-9a-f]{16}\b|\b[0-9a-f]{8}\b", XXH3)
    assert xxhash.xxh3_64_hexdigest(b"") == nothing
    assert xxhash.xxh3_64_hexdigest(b"123456789") == nine
    assert checksum32(b"123456789") == int(low, 16) == int(nine[8:], 16)
    crc = re.search(r"`123456789` it is ([0-9]+) \((0x[0-9a-f]{8})\)", PAGE)
    assert crc is not None
    assert zlib.crc32(b"123456789") == int(crc[1]) == int(crc[2], 16)


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
