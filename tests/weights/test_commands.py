"""gradwire delta, patch, inspect and fold."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from cli_runner import run
from gradwire.files import OutputFile
from gradwire.weights import Publisher, Subscriber, WeightsError, update
from states import assert_same, bits, state_of


def save(path: Path, time: int, sharded: bool) -> Path:
    state = state_of(time)
    if not sharded:
        safetensors.torch.save_file(state, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    path.mkdir()
    for number, (name, values) in enumerate(state.items()):
        safetensors.torch.save_file({name: values}, path / f"model-{number}.safetensors")
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {k: v for file in files for k, v in safetensors.torch.load_file(file).items()}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_is_patched_in_place(tmp_path: Path, sharded: bool) -> None:
    old, new = save(tmp_path / "old", 1, sharded), save(tmp_path / "new", 2, False)
    delta = tmp_path / "d"
    report = run("delta", old, new, "-o", delta, "--json").json
    assert report["bytes"] == delta.stat().st_size < new.stat().st_size / 3
    assert report["tensors"] == 3
    assert report["changed"] == 39
    files = sorted(path.name for path in tmp_path.rglob("*"))
    assert run("patch", old, delta, "--json").json["output"] == str(old)
    assert_same(load(old), state_of(2))
    assert sorted(path.name for path in tmp_path.rglob("*")) == files
    again = run("patch", old, delta)
    assert again.code == 1
    assert f"{old}: tensor '" in again.err
    assert "is not the one that the delta was made for: its values are others" in again.err
    assert again.err.strip().endswith("Nothing was changed; perhaps the delta was applied already")
    assert_same(load(old), state_of(2))


def test_who_stops_a_patch_is_told_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = save(tmp_path / "old", 1, False), save(tmp_path / "new", 2, False)
    assert run("delta", old, new, "-o", tmp_path / "d").code == 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(update.Update, "apply_delta", stop)
    stopped = run("patch", old, tmp_path / "d")
    assert stopped.code == 130
    assert f"gradwire: {old} is neither the old checkpoint nor the new one now" in stopped.err


def test_a_patch_that_never_began_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk there is no room for the marker, and it said to copy the checkpoint anew."""
    old, new = save(tmp_path / "old", 1, False), save(tmp_path / "new", 2, False)
    assert run("delta", old, new, "-o", tmp_path / "d").code == 0
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(OutputFile, "write", write)
    stopped = run("patch", old, tmp_path / "d")
    assert (stopped.code, stopped.out) == (1, "")
    assert stopped.err.startswith("gradwire: error: ")
    assert stopped.err.endswith(": No space left on device\n")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_the_result_can_be_another_file(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 1, True), save(tmp_path / "new", 2, True)
    kept = {path: path.read_bytes() for path in old.iterdir()}
    found = run("delta", old, new, "-o", tmp_path / "d")
    assert found.out.startswith(f"{old} -> {new}: {tmp_path / 'd'}, ")
    result = tmp_path / "result.safetensors"
    assert run("patch", old, tmp_path / "d", "-o", result).code == 0
    assert_same(load(result), state_of(2))
    assert {path: path.read_bytes() for path in old.iterdir()} == kept
    assert "exists; --force" in run("patch", old, tmp_path / "d", "-o", result).err
    assert "exists; --force" in run("delta", old, new, "-o", tmp_path / "d").err
    assert run("delta", old, new, "-o", tmp_path / "d", "--force").code == 0


def test_a_folder_gets_one_file_where_tensors_appear(tmp_path: Path) -> None:
    old = save(tmp_path / "old", 1, True)
    new = tmp_path / "new.safetensors"
    state = {"weight": state_of(2)["weight"], "head": torch.ones(2, 3).to(torch.float8_e4m3fn)}
    safetensors.torch.save_file(state, new)
    assert run("delta", old, new, "-o", tmp_path / "d").code == 0
    assert run("patch", old, tmp_path / "d").code == 0
    assert [path.name for path in old.iterdir()] == ["model.safetensors"]
    assert_same(load(old), state)


def test_inspect_shows_a_delta(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 1, False), save(tmp_path / "new", 2, False)
    run("delta", old, new, "-o", tmp_path / "d")
    found = run("inspect", tmp_path / "d", "--json").json
    assert found["kind"] == "delta"
    assert found["changed"] == 39
    kinds = {tensor["name"]: (tensor["kind"], tensor["dtype"]) for tensor in found["tensors"]}
    assert kinds == {
        "weight": ("delta", "BF16"),
        "bias": ("delta", "F32"),
        "step": ("delta", "I64"),
    }
    assert "weight" in run("inspect", tmp_path / "d").out
    plain = run("inspect", old)
    assert plain.code == 1
    assert "it may be a .safetensors file, `gradwire compress` reads those" in plain.err
    (tmp_path / "d").write_bytes((tmp_path / "d").read_bytes()[:-1])
    assert run("inspect", tmp_path / "d").code == 1


def test_fold_makes_one_delta(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    for version in range(1, 5):
        publisher.publish(state_of(version))
    report = run("fold", tmp_path, 1, 4, "--json").json
    assert (report["first"], report["last"]) == (1, 4)
    assert (tmp_path / "v000004.from.v000001.json").exists()
    assert "is there already" in run("fold", tmp_path, 1, 4).err
    assert run("fold", tmp_path, 2, 4).out.startswith(f"{tmp_path}: version 2 -> 4, ")
    subscriber, target = Subscriber(tmp_path, version=1), state_of(1)
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, state_of(4))


def test_a_dot_has_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = save(tmp_path / "old", 1, True), save(tmp_path / "new", 2, True)
    out = tmp_path / "out"
    out.mkdir()
    (new / "below").mkdir()
    for folder, dot in ((new, "."), (new / "below", "..")):
        monkeypatch.chdir(folder)
        assert run("delta", old, dot, "-o", out, "--force").code == 0
        assert [path.name for path in out.iterdir()] == ["new.delta"]
    monkeypatch.chdir(old)
    assert run("patch", ".", out / "new.delta", "-o", out).code == 0
    assert_same(load(out / "old.safetensors"), state_of(2))
    assert_same(load(old), state_of(1))
    for place in (".", "..", str(old)):
        found = run("compress", place, "-c", "int8")
        assert found.code == 1
        assert found.err == f"gradwire: error: {place}: not a .npy or .safetensors file\n"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    new = save(tmp_path / "new", 2, False)
    found = run("delta", tmp_path / "old", new, "-o", tmp_path / "d")
    assert f"{tmp_path / 'old'}: no .safetensors file with tensors is there" in found.err
    assert f"{tmp_path / 'd'}: No such file" in run("patch", new, tmp_path / "d").err
    found = run("patch", new, new)
    assert "it is a .safetensors file without deltas" in found.err
    assert "there is no version 1; the newest is 0" in run("fold", tmp_path, 0, 3).err


def test_a_name_that_no_delta_can_have_is_refused(tmp_path: Path) -> None:
    """A .safetensors file may have it; the delta was written, and nobody could read it."""
    nameless, named = save(tmp_path / "old", 1, False), save(tmp_path / "new", 2, False)
    safetensors.torch.save_file({"": torch.ones(3)}, nameless)
    for old, new in ((nameless, named), (named, nameless)):
        found = run("delta", old, new, "-o", tmp_path / "d")
        assert found.code == 1
        assert f"{nameless}: '' cannot be the name of a tensor" in found.err
    assert not (tmp_path / "d").exists()


def test_a_folder_without_one_of_its_files_is_no_checkpoint(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 1, True), save(tmp_path / "new", 2, True)
    places = {name: f"model-{i}.safetensors" for i, name in enumerate(state_of(2))}
    index = new / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert run("delta", old, new, "-o", tmp_path / "d").code == 0
    (new / "model-1.safetensors").unlink()
    for given in ((old, new), (new, old)):
        found = run("delta", *given, "-o", tmp_path / "e")
        assert found.code == 1
        assert f"{index} names model-1.safetensors, which is missing" in found.err
    assert "which is missing" in run("patch", new, tmp_path / "d").err
    with pytest.raises(WeightsError, match="which is missing"):
        Publisher(tmp_path / "store", base=new).publish(state_of(2))
    safetensors.torch.save_file({}, new / "model-1.safetensors")
    with pytest.raises(WeightsError, match=f"{index} names tensor 'bias', which is missing"):
        Publisher(tmp_path / "store", base=new).publish(state_of(2))
    index.write_text("[]")
    assert f"{index}: it is no index" in run("delta", old, new, "-o", tmp_path / "e").err


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 1, False), save(tmp_path / "new", 2, False)
    delta = tmp_path / "d"
    assert run("delta", old, new, "-o", delta).code == 0
    link = tmp_path / "link"
    link.symlink_to(new)
    before = [path.read_bytes() for path in (old, new, delta)]
    for given in (
        *(("delta", old, new, "-o", output) for output in (old, new, link)),
        *(("patch", old, delta, "-o", output) for output in (old, delta)),
        ("compress", "-c", "int8", new, "-o", new),
    ):
        found = run(*given, "--force")
        assert found.code == 1
        assert f"{given[-1]} is an input, and is not overwritten" in found.err
    assert [path.read_bytes() for path in (old, new, delta)] == before


def test_no_file_is_put_among_those_of_an_input(tmp_path: Path) -> None:
    """A folder with it was no checkpoint: it had each tensor twice, or deltas as tensors."""
    old, new = save(tmp_path / "old", 1, True), save(tmp_path / "new", 2, True)
    assert run("delta", old, new, "-o", tmp_path / "d").code == 0
    for given in (
        *(("delta", old, new, "-o", folder / "d.safetensors") for folder in (old, new)),
        ("patch", old, tmp_path / "d", "-o", old / "model.safetensors"),
    ):
        found = run(*given)
        assert found.code == 1
        assert f"{given[-1]} would be one of the files of {given[-1].parent}, an input" in found.err
    assert run("delta", old, new, "-o", old / "to_new.delta").code == 0
    assert run("patch", old, old / "to_new.delta").code == 0
    assert_same(load(old), state_of(2))


# The result is the new file, byte by byte ------------------------------------------------------


def other_writer(path: Path, state: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """As a program does that sorts the tensors by their names, and fills the header up to 64."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data, dtypes = b"", {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
    for name, values in sorted(state.items()):
        place = [len(data), len(data := data + bits(values))]
        header[name] = {
            "data_offsets": place,
            "shape": list(values.shape),
            "dtype": dtypes[values.dtype],
        }
    text = json.dumps(header, indent=1).encode()
    text += b" " * (-len(text) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


Writer = Callable[[Path, dict[str, torch.Tensor]], None]


def save_with(metadata: dict[str, str]) -> Writer:
    return lambda path, state: safetensors.torch.save_file(state, path, metadata)


WRITERS: dict[str, tuple[Writer, Writer]] = {
    "without metadata": (save_with({}), save_with({})),
    "with the same": (save_with({"format": "pt"}), save_with({"format": "pt"})),
    "with others": (save_with({"format": "pt", "step": "1"}), save_with({"step": "2", "é": '"'})),
    "with none any more": (save_with({"format": "pt"}), save_with({})),
    "by another program": (
        save_with({"format": "pt"}),
        lambda path, state: other_writer(path, state, {"by": "me"}),
    ),
    "both by another program": (lambda path, state: other_writer(path, state, {}),) * 2,
}
SAME = {"without metadata", "with the same", "both by another program"}
RESULTS: dict[str, dict[str, torch.Tensor]] = {
    "few values": {},
    "a new tensor": {"new": torch.ones(5)},
    "another shape": {"bias": torch.ones(2)},
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("what", RESULTS)
@pytest.mark.parametrize("place", ["file", "folder", "output"])
def test_a_patched_file_is_the_new_file(tmp_path: Path, kind: str, what: str, place: str) -> None:
    """Metadata and the order of tensors, too; only a header that is new takes room in the delta."""
    old, new, result = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "result"))
    if place == "folder":
        (tmp_path / "old").mkdir()
        old = tmp_path / "old" / "model.safetensors"
    first, second = WRITERS[kind]
    first(old, state_of(1))
    second(new, state_of(2) | RESULTS[what])
    named = old.parent if place == "folder" else old
    assert run("delta", named, new, "-o", tmp_path / "d").code == 0
    has_head = b"gradwire.head" in (tmp_path / "d").read_bytes()
    assert has_head == (what != "few values" or kind not in SAME)
    output = ["-o", result] if place == "output" else []
    assert run("patch", named, tmp_path / "d", *output).code == 0
    assert (result if output else old).read_bytes() == new.read_bytes()


def test_shards_give_their_metadata_to_the_one_file(tmp_path: Path) -> None:
    for name, time in (("old", 1), ("new", 2)):
        (tmp_path / name).mkdir()
        for number, (tensor, values) in enumerate(state_of(time).items()):
            metadata = {"format": "pt", f"{name} {number}": "x"}
            file = tmp_path / name / f"model-{number}.safetensors"
            safetensors.torch.save_file({tensor: values}, file, metadata)
    assert run("delta", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "d").code == 0
    result = tmp_path / "result.safetensors"
    assert run("patch", tmp_path / "old", tmp_path / "d", "-o", result).code == 0
    assert_same(load(result), state_of(2))
    with safetensors.safe_open(result, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "new 0": "x", "new 1": "x", "new 2": "x"}


HEAD = json.dumps(
    {
        "step": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        "bias": {"dtype": "F32", "shape": [7], "data_offsets": [8, 36]},
        "weight": {"dtype": "BF16", "shape": [100, 30], "data_offsets": [36, 6036]},
    }
)


@pytest.mark.parametrize(
    "head",
    [
        "{",
        "[]",
        '{"weight":1}',
        '{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        HEAD.replace("100", "100.0"),
        HEAD.replace("[0, ", "[4, "),
        HEAD.replace("6036", "6034"),
        HEAD.replace("{", '{"__metadata__": {"by": 1}, ', 1),
    ],
)
def test_a_delta_with_the_head_of_another_file_is_damaged(tmp_path: Path, head: str) -> None:
    old, new = save(tmp_path / "old", 1, False), tmp_path / "new.safetensors"
    safetensors.torch.save_file(state_of(2), new, {"by": "me"})
    assert run("delta", old, new, "-o", tmp_path / "d").code == 0
    tensors = safetensors.torch.load_file(tmp_path / "d")
    with safetensors.safe_open(tmp_path / "d", "pt") as opened:
        metadata = opened.metadata()
    safetensors.torch.save_file(tensors, tmp_path / "d", metadata | {"gradwire.head": head})
    kept = old.read_bytes()
    stopped = run("patch", old, tmp_path / "d")
    assert stopped.code == 1
    assert f"{tmp_path / 'd'}: " in stopped.err
    assert old.read_bytes() == kept
    safetensors.torch.save_file(tensors, tmp_path / "d", metadata | {"gradwire.head": HEAD})
    assert run("patch", old, tmp_path / "d").code == 0
    assert_same(load(old), state_of(2))


def test_tensors_that_the_delta_does_not_know_are_not_lost(tmp_path: Path) -> None:
    old = save(tmp_path / "old", 1, True)
    new = tmp_path / "new.safetensors"
    safetensors.torch.save_file({"weight": state_of(2)["weight"]}, new)
    assert run("delta", old, new, "-o", tmp_path / "d").code == 0
    mine = old / "adapter.safetensors"
    safetensors.torch.save_file({"lora": torch.ones(3)}, mine)
    stopped = run("patch", old, tmp_path / "d")
    assert stopped.code == 1
    assert "tensors that the delta does not know, which would be lost: 'lora'. " in stopped.err
    assert stopped.err.strip().endswith("Nothing was changed; move them to another folder")
    mine.unlink()
    assert run("patch", old, tmp_path / "d").code == 0
    assert list(load(old)) == ["weight"]


def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a variable of a shell that is not set."""
    monkeypatch.chdir(tmp_path)
    old, new = save(tmp_path / "old", 1, False), save(tmp_path / "new", 2, False)
    before = set(tmp_path.iterdir())
    for given, name in (
        (("delta", old, new, "-o", ""), "--output"),
        (("delta", "", new, "-o", "d"), "OLD"),
        (("compress", "-c", "int8", new, ""), "FILE"),
    ):
        found = run(*given)
        assert found.code == 2
        said = " ".join(found.err.replace("│", " ").split())
        assert "the path is empty; '.' is the current folder" in said
        assert name in said
    assert set(tmp_path.iterdir()) == before


def test_a_result_without_a_name_is_refused(tmp_path: Path) -> None:
    """It was called ".delta"."""
    found = run("delta", save(tmp_path / "old", 1, True), "/", "-o", tmp_path)
    assert (found.code, found.out) == (1, "")
    assert "/ gives the result no name: name it with --output" in found.err
    assert not (tmp_path / ".delta").exists()
