"""Every codec of the registry at the front ends: its parameters, the command, float16 arrays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire
from cli_runner import run
from golden import ROOT
from gradients import NAMES, gradient, has_code, same_bits

CODECS = {codec["name"]: codec for codec in gradwire.codecs()}
PARAMETERS = [
    (name, parameter) for name, codec in CODECS.items() for parameter in codec["parameters"]
]
IDS = [f"{name}-{parameter['name']}" for name, parameter in PARAMETERS]
# Each ternary codec takes every coder.
TERNARY = ["3lc", "3lc:s=1.75", "stc", "stoch3", "terngrad:pack=trits5"]
CODERS = ["none", "zre", "rice"]

every_parameter = pytest.mark.parametrize(("name", "parameter"), PARAMETERS, ids=IDS)


def with_key(codec: str, key: str) -> str:
    return codec + (":" if ":" not in codec else ",") + key


def canonical(codec: str) -> str:
    return gradwire.Compressor(codec, 3).codec


# Parameters


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("qsgd:bits=4,levels=7", "codec 'qsgd': give bits or levels, not both"),
        ("terngrad:coder=zre", "codec 'terngrad': a coder works on five values to a byte"),
        ("terngrad:ef=on", "codec 'terngrad': ef=on is refused: .* take 3lc"),
        ("stoch3:ef=on", "codec 'stoch3': ef=on is refused: .* take 3lc"),
        ("qsgd:bits=2,ef=on", "codec 'qsgd': ef=on is refused: .* take 3lc"),
        ("qsgd:norm=l2,ef=on", "codec 'qsgd': ef=on is refused: .* norm=max, or bucket=192"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(codec: str, message: str) -> None:
    with pytest.raises(gradwire.GradwireError, match=message) as error:
        canonical(codec)
    assert has_code(error, "bad_parameter")


@every_parameter
def test_a_stated_default_is_the_default(name: str, parameter: dict[str, str]) -> None:
    default = parameter["default"]
    if default in ("whole", "by bits"):  # these defaults cannot be written
        return
    text = f"{name}:{parameter['name']}={default}"
    if parameter["name"] == "residual" and not CODECS[name]["error_feedback"]:
        assert canonical(text + ",ef=on") == canonical(f"{name}:ef=on")
    else:
        assert canonical(text) == canonical(name)


@every_parameter
def test_each_listed_value_is_taken(name: str, parameter: dict[str, str]) -> None:
    key, values = parameter["name"], parameter["values"]
    rest = ",ef=on" if key == "residual" else ""
    rest += ",pack=trits5" if (name, key) == ("terngrad", "coder") else ""
    if match := re.fullmatch(r"\[(.+), (.+)\)", values):
        taken, refused = [match[1]], [match[2], "-1", "nan"]
    elif match := re.fullmatch(r"\[(.+), (.+)\]", values):
        taken, refused = [match[1], match[2]], ["0", "1.01", "nan"]
    elif match := re.fullmatch(r"(\d+) to (\d+)", values):
        taken, refused = [match[1], match[2]], [str(int(match[1]) - 1), str(int(match[2]) + 1)]
    elif match := re.fullmatch(r"multiple of (\d+)", values):
        taken, refused = [match[1], str(7 * int(match[1]))], ["0", str(int(match[1]) + 1)]
    else:
        taken, refused = values.split("|"), ["no", f"{values}|no"]
    for value in taken:
        canonical(f"{name}:{key}={value}{rest}")
    for value in [*refused, ""]:
        with pytest.raises(gradwire.GradwireError, match=f"{key}={re.escape(value)} ") as error:
            canonical(f"{name}:{key}={value}{rest}")
        assert has_code(error, "bad_parameter")
        assert "give " in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_and_empty_keys_list_the_valid_ones(name: str) -> None:
    for text in ("nokey=1", "", "=", "nokey"):
        with pytest.raises(gradwire.GradwireError, match="valid: ") as error:
            canonical(f"{name}:{text}")
        assert has_code(error, "bad_parameter")
        for parameter in CODECS[name]["parameters"]:
            assert f"{parameter['name']}={parameter['values']}" in str(error.value)


def test_small_numbers_are_written_as_people_write_them() -> None:
    assert canonical("topk:ratio=1e-4") == "topk:ratio=0.0001"
    with pytest.raises(gradwire.GradwireError, match=r"\[0\.0001, 1\)"):
        canonical("stc:density=0")
    with pytest.raises(gradwire.GradwireError, match="give a whole number from 1 to 8191"):
        canonical("qsgd:levels=0")


def test_the_command_lists_defaults_values_and_sources() -> None:
    said = run("codecs", "--all").out
    lines, words = said.splitlines(), set(said.split())
    for codec in CODECS.values():
        assert words.issuperset((codec["summary"] + " " + codec["source"]).split())
    for name, parameter in PARAMETERS:
        row = [name, *(parameter[key] for key in ("name", "default", "values", "help"))]
        assert any(line.split() == " ".join(row).split() for line in lines), row


def test_the_page_of_a_codec_says_when_to_use_it() -> None:
    """Each codec has a page with its name, and the overview names no others."""
    pages = [path.read_text() for path in sorted((ROOT / "src" / "codecs").glob("*/spec.md"))]
    assert sorted(re.findall(r"^# (\S+)$", "".join(pages), re.M)) == sorted(CODECS)
    for page in pages:
        advice = page.partition("\n**When to use it.** Use it ")[2].partition("\n\n")[0]
        assert " Do not use it " in " ".join(advice.split()), page[:20]
    overview = (ROOT / "docs" / "codecs.md").read_text()
    rows = [line.split("|")[1] for line in overview.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([^`:]+)[^`]*`", row)}
    assert named <= set(CODECS)
    assert len(named) >= 12


# The command


@pytest.mark.parametrize(
    "codec", [*NAMES, *(with_key(codec, f"coder={coder}") for codec in TERNARY for coder in CODERS)]
)
def test_files_come_back_as_the_codec_keeps_them(tmp_path: Path, codec: str) -> None:
    x = gradient(30 * 50).reshape(30, 50)
    np.save(tmp_path / "x.npy", x)
    report = run("compress", tmp_path / "x.npy", "--codec", codec, "--json").json["files"][0]
    rows = run("inspect", tmp_path / "x.npy.gw", "--json").json["tensors"]
    assert canonical(rows[0]["codec"]).partition(",ef=")[0] == canonical(codec)
    run("decompress", tmp_path / "x.npy.gw", "-o", tmp_path / "y.npy")
    restored = np.load(tmp_path / "y.npy")
    assert same_bits(restored.ravel(), gradwire.decode(gradwire.encode(x, codec)))
    assert report["max_error"] == np.abs(x.astype(float) - restored).max()


def test_what_makes_up_for_a_large_error_is_true_of_the_codec(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(2000))
    for codec, said in {"stc": "error feedback", "terngrad": "may cancel out"}.items():
        assert said in run("compress", tmp_path / "x.npy", "-c", codec, "-f").err
    assert "error feedback" not in run("compress", tmp_path / "x.npy", "-c", "stoch3", "-f").err


# Values


@pytest.mark.parametrize("codec", TERNARY)
def test_a_coder_changes_bytes_and_no_values(codec: str) -> None:
    x = gradient(100_003)
    frames = [gradwire.encode(x, with_key(codec, f"coder={coder}")) for coder in CODERS]
    decoded = [gradwire.decode(frame) for frame in frames]
    assert same_bits(decoded[1], decoded[0])
    assert same_bits(decoded[2], decoded[0])
    assert len(set(map(len, frames))) == 3


@pytest.mark.parametrize("name", NAMES)
def test_float16_arrays_are_encoded_as_the_float32_they_equal(name: str) -> None:
    x = gradient(41_003).astype(np.float16)
    takes_feedback = any("on" in p["values"].split("|") for p in CODECS[name]["parameters"])
    for codec in (name, *([f"{name}:ef=on"] if takes_feedback else [])):
        narrow, wide = (gradwire.Compressor(codec, x.size, seed=1) for _ in range(2))
        for step in range(2):
            frame, other = narrow.encode(x, step), wide.encode(x.astype(np.float32), step)
            assert gradwire.inspect(frame)["dtype"] == "float16"
            assert same_bits(gradwire.decode(frame), gradwire.decode(other))
        assert same_bits(narrow.residual, wide.residual)


SPECIAL: dict[str, Any] = {
    "constant": np.full(1000, -0.25, np.float32),
    "one": np.array([3], np.float32),
    "dominant": np.where(np.arange(1000) == 511, 1, 1e-6).astype(np.float32),
    "denormal": np.full(1000, 3 * 2.0**-149, np.float32),
    "minus zero": np.full(1000, -0.0, np.float32),
}


@pytest.mark.parametrize("codec", [*NAMES, "qsgd:levels=127", "qsgd:levels=1000,coder=elias"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_inputs_keep_what_was_not_sent(codec: str, kind: str) -> None:
    x = SPECIAL[kind]
    compressor = gradwire.Compressor(codec, x.size)
    decoded = gradwire.decode(compressor.encode(x))
    assert np.isfinite(decoded).all()
    if compressor.residual is not None:
        assert np.array_equal(compressor.residual, x - decoded)
    if codec.startswith("qsgd") and kind == "dominant":
        assert decoded[511] == pytest.approx(1, rel=1e-6)
