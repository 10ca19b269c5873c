"""`gradwire inspect` describes frames, packets and compressed files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire
from cli_runner import run
from gradients import gradient

safetensors_numpy = pytest.importorskip("safetensors.numpy")


def test_inspect_frame(tmp_path: Path) -> None:
    frame = gradwire.encode(gradient(1000), "3lc:s=1.75")
    (tmp_path / "f").write_bytes(frame)
    assert run("inspect", tmp_path / "f", "--json").json == gradwire.inspect(frame)
    text = run("inspect", tmp_path / "f").out
    assert "3lc:s=1.75" in text
    assert "1000" in text


def test_inspect_shows_the_classes_of_inceptionn(tmp_path: Path) -> None:
    # Each half of a chunk, and a second chunk: 0, 8, 16 and 32 bits with bound=10.
    values = np.repeat(np.array([0.0001, 0.01, 0.5, 2.0], np.float32), [40960, 20480, 10240, 10240])
    frame = gradwire.encode(values, "inceptionn")
    shares = {"0": 0.5, "8": 0.25, "16": 0.125, "32": 0.125}
    assert gradwire.inspect(frame)["class_shares"] == shares
    (tmp_path / "f").write_bytes(frame)
    assert run("inspect", tmp_path / "f", "--json").json["class_shares"] == shares
    assert "class shares 0=0.5, 8=0.25, 16=0.125, 32=0.125" in " ".join(
        run("inspect", tmp_path / "f").out.split()
    )
    np.save(tmp_path / "x.npy", values)
    run("compress", tmp_path / "x.npy", "-c", "inceptionn")
    (tensor,) = run("inspect", tmp_path / "x.npy.gw", "--json").json["tensors"]
    assert tensor["class_shares"] == shares
    assert "0=0.5, 8=0.25" in run("inspect", tmp_path / "x.npy.gw").out
    assert "class_shares" not in gradwire.inspect(gradwire.encode(values, "bf16"))
    assert "class_shares" not in gradwire.inspect(gradwire.encode(values[:0], "inceptionn"))


def test_tags_that_no_decoder_accepts_are_named() -> None:
    golden = Path(__file__).parents[1] / "golden" / "errors"
    frame = (golden / "inceptionn-absent-value.frame").read_bytes()
    with pytest.raises(gradwire.GradwireError, match="inceptionn"):
        gradwire.inspect(frame)


def test_inspect_container(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {"w": gradient(200).reshape(10, 20), "n": np.arange(3)}
    safetensors_numpy.save_file(tensors, tmp_path / "m.safetensors", {"a": "b"})
    run("compress", tmp_path / "m.safetensors", "-c", "bf16")
    path = tmp_path / "m.safetensors.gw"
    report = run("inspect", path, "--json").json
    assert report["kind"] == "container"
    assert report["restores"] == "safetensors"
    assert report["metadata"] == {"a": "b"}
    assert report["container_bytes"] == path.stat().st_size
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows["w"]["codec"] == "bf16"
    assert rows["w"]["shape"] == [10, 20]
    assert rows["n"]["storage"] == "plain"
    text = " ".join(run("inspect", path).out.split())
    assert "metadata a=b" in text
    assert "w F32 10x20 frame 432 bf16 17.3 no" in text
    assert "n I64 3 plain 24 - - -" in text


def test_inspect_says_what_another_file_is(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(10))
    safetensors_numpy.save_file({"a": gradient(3)}, tmp_path / "x.safetensors")
    (tmp_path / "x.txt").write_text("something else")
    for name, hint in {
        "x.npy": "it is a .npy file, `gradwire compress` reads those",
        "x.safetensors": "it may be a .safetensors file, `gradwire compress` reads those",
        "x.txt": "nor a packet ('GP') nor a compressed file ('GC') nor a delta",
    }.items():
        result = run("inspect", tmp_path / name)
        assert result.code == 1
        assert result.err.startswith(f"gradwire: error: {tmp_path / name}: ")
        assert result.err.endswith(f"{hint}\n")
