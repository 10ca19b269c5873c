"""What is on this machine and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem

from cli_runner import run
from gradwire.contrib.sglang import WeightFolders
from gradwire.weights import (
    Folder,
    MissingVersionError,
    Publisher,
    Subscriber,
    WeightsError,
    fold,
    prune,
)
from gradwire.weights.folder import open_folder
from states import assert_same

STATE = {"x": torch.ones(3)}


def publish(store: Any, **options: Any) -> None:
    Publisher(store, **options).publish(STATE)


USES = [publish, Subscriber, lambda store: prune(store, 1), lambda store: fold(store, 1, 3)]


@pytest.mark.parametrize("empty", ["", "file://"])
def test_an_empty_path_is_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    """An unset variable of a shell gave the current folder."""
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, Callable[[], Any]]] = [
        *(("store", lambda use=use: use(empty)) for use in USES),
        ("base", lambda: Publisher(tmp_path / "store", base=empty)),
        ("local", lambda: Subscriber(tmp_path / "store", local=empty)),
        ("path", lambda: WeightFolders(empty, tmp_path)),
        ("base", lambda: WeightFolders(tmp_path, empty)),
    ]
    for argument, use in asked:
        with pytest.raises(ValueError, match=f"^{argument}: the path is empty"):
            use()
    assert "store: the path is empty; '.' is the" in run("fold", empty, 1, 3).err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["s3", "memory", "simplecache::s3"])
@pytest.mark.parametrize("use", USES)
def test_a_path_that_was_made_of_an_address_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, use: Callable[[Any], Any]
) -> None:
    """pathlib makes one slash of two."""
    monkeypatch.chdir(tmp_path)
    said = f"{scheme}:/bucket/policy is an address.* given as a text, '{scheme}://bucket/policy'"
    with pytest.raises(WeightsError, match=said):
        use(Path(f"{scheme}://bucket/policy"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("use", USES)
def test_a_file_is_no_store(tmp_path: Path, use: Callable[[Any], Any]) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(STATE, file)
    with pytest.raises(WeightsError, match=f"{file} is a file; a store is a folder"):
        use(file)


@pytest.mark.parametrize("address", ["s3://bucket/local", Path("s3://bucket/local")])
def test_checkpoints_are_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "s3:/+bucket/local is an address, and no path on this machine, where a checkpoint is"
    with pytest.raises(WeightsError, match=said):
        Subscriber("store", local=address)
    with pytest.raises(WeightsError, match=said):
        publish("store", base=address)
    ran = run("delta", address, "new", "-o", "delta")
    assert (ran.code, "is an address" in ran.err) == (1, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("host", "kind"), [("", str), ("", Path), ("localhost", str)])
def test_addresses_of_files_are_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, kind: type
) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file(STATE, tmp_path / "base.safetensors")
    before = f"file://{host}{tmp_path}"
    publish(f"{before}/store", base=f"{before}/base.safetensors")
    subscriber = Subscriber(kind(f"{before}/store"), local=tmp_path / "base.safetensors")
    assert subscriber.fetch() is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.safetensors", "store"]


def test_an_address_of_a_file_may_be_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "my store, 100% ä"
    publish(folder.as_uri())
    assert Subscriber(folder).fetch() is not None
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("store", ["memory://", "memory:///", "memory://a/"])
def test_the_root_of_an_address_is_no_folder_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """A folder of the name "memory:" was made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    publish(store)
    assert Subscriber(store).fetch() is not None
    assert not list(tmp_path.iterdir())


class Bucket(MemoryFileSystem):  # type: ignore[misc]
    """As s3fs has it: a file has a version, its size is looked up in the last list, and a bucket
    cannot be made by who may write below a prefix alone."""

    cachable = False
    listed: list[str] | None = None

    def cat_file(
        self,
        path: str,
        version_id: str | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> bytes:
        if version_id:
            raise TypeError(f"Invalid type for parameter VersionId, value: {version_id}")
        if start is None and end is None and self.listed is not None and path not in self.listed:
            raise FileNotFoundError(path)
        return bytes(super().cat_file(path, start, end))

    def ls(self, path: str, **options: Any) -> list[str]:
        self.listed = list(super().ls(path, **options))
        return self.listed

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise PermissionError("AccessDenied")


def test_a_bucket_is_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be published to one or fetched from it: a place in a file was taken for a
    version of it."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda place: (Bucket(), "/bucket/policy"))
    place = "s3://bucket/policy"
    publish(place)
    subscriber, target = Subscriber(place), {"x": torch.zeros(3)}
    remove = open_folder(place).remove
    remove("newest.json")  # as it is late, a list is looked at
    assert subscriber.fetch() is not None
    subscriber.apply_(target)
    publisher = Publisher(place)
    for number in (2, 3):
        publisher.publish({"x": torch.full((3,), float(number))})
    part = next(name for name in open_folder(place).names() if name.endswith(".safetensors"))
    whole = open_folder(place).read(part)
    assert open_folder(place).read(part, 8, 20) == whole[8:20]
    assert subscriber.fetch() is not None
    assert subscriber.apply_(target).version == 3
    assert target["x"].tolist() == [3.0] * 3
    for name in open_folder(place).names():
        remove(name)
    publish(place)
    assert subscriber.fetch() is not None
    assert subscriber.apply_(target).version == 1
    assert_same(target, STATE)


def test_a_path_stays_where_it_was_when_the_program_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver found no versions any more, and a publisher began anew in the other folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file(STATE, "base.safetensors")
    publisher = Publisher("store", base="base.safetensors")
    subscriber = Subscriber("store", local="base.safetensors")
    folders = WeightFolders("folders", "base.safetensors")
    for number in (1, 2):
        monkeypatch.chdir(tmp_path / "elsewhere")
        state = {"x": torch.full((3,), float(number + 1))}
        assert publisher.publish(state).version == folders.publish(state) == number
        assert subscriber.fetch() is not None
        assert subscriber.apply_().version == number
    assert not list((tmp_path / "elsewhere").iterdir())
    assert_same(safetensors.torch.load_file(tmp_path / "base.safetensors"), state)


class Shelf(Folder):
    """A store of one's own: the four methods, nothing else."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name][begin:end]

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        if only_new and name in self.files:
            raise FileExistsError(name)
        self.files[name] = b"".join(pieces)

    def names(self) -> list[str]:
        return list(self.files)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)


def test_four_methods_make_a_store() -> None:
    """Whatever reads a manifest named the store, by a name that it did not have."""
    shelf = Shelf()
    for _ in range(5):  # each from a publisher of its own, as after restarts
        publish(shelf, anchor_every=2)
    subscriber = Subscriber(shelf)
    with pytest.raises(MissingVersionError, match="of this program: there is no version 9"):
        subscriber.fetch(9)
    subscriber.fetch()
    target = {"x": torch.zeros(3)}
    assert subscriber.apply_(target).version == 5
    assert_same(target, STATE)
    fold(shelf, 3, 5)
    prune(shelf, 1)


def test_a_store_without_lists_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over plain HTTP: a receiver that was more than a version behind got an error."""
    shelf, target = Shelf(), {"x": torch.zeros(3)}
    publish(shelf)
    subscriber = Subscriber(shelf)
    subscriber.fetch()
    subscriber.apply_(target)
    publisher = Publisher(shelf)
    for number in (2, 3, 4):
        publisher.publish({"x": torch.full((3,), float(number))})

    def refuse(self: Shelf) -> list[str]:
        raise RuntimeError("403, message='Forbidden'")

    monkeypatch.setattr(Shelf, "names", refuse)
    assert subscriber.fetch() is not None
    assert subscriber.apply_(target).version == 4
    assert target["x"].tolist() == [4.0] * 3
    assert Subscriber(shelf).fetch() is not None
