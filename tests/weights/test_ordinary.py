"""What trainers and servers meet every day: restarts, crashes, late files, odd servers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.weights import MissingVersionError, Publisher, Subscriber, WeightsError, prune
from gradwire.weights.folder import MemoryFolder, RemoteFolder
from gradwire.weights.store import Store

State = dict[str, Any]


def ones(n: int = 4, value: float = 1.0) -> torch.Tensor:
    return torch.full((n,), float(value))


# dtypes ------------------------------------------------------------------------------------------


def test_floats_of_the_base_keep_its_dtype(tmp_path: Path) -> None:
    """A checkpoint in bfloat16 with a bias in float32, as routers of experts have."""
    state = {"weight": ones() / 3, "bias": ones() / 3}
    base = {"weight": state["weight"].bfloat16(), "bias": state["bias"]}
    publisher = Publisher(tmp_path, base=base, dtype="bfloat16")
    served = {name: values.clone() for name, values in base.items()}
    subscriber = Subscriber(tmp_path, version=0)
    for step in range(2):
        state["bias"] += 1e-4
        state["new"] = ones() / 3
        assert publisher.publish(state).version == step + 1
        subscriber.fetch()
        subscriber.apply_(served)
        assert torch.equal(served["bias"], state["bias"])
        assert served["weight"].dtype == served["new"].dtype == torch.bfloat16


def test_a_function_says_which_floats_are_rounded() -> None:
    def dtype_of(name: str) -> str | None:
        return None if name.endswith("scale") else "bfloat16"

    folder = MemoryFolder()
    Publisher(folder, dtype=dtype_of).publish({"weight": ones() / 3, "scale": ones() / 3})
    found: State = {}
    subscriber = Subscriber(folder)
    subscriber.fetch()
    subscriber.apply_(found)
    assert (found["weight"].dtype, found["scale"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found["scale"], ones() / 3)


def test_a_dtype_that_the_base_has_not_is_named(tmp_path: Path) -> None:
    base = {"large": ones(100), "small": ones().bfloat16()}
    publisher = Publisher(tmp_path, base=base)
    with pytest.warns(RuntimeWarning, match=r"'small' is F32 \[4\] here and is BF16 there"):
        publisher.publish({"large": ones(100), "small": ones()})


# Ranks -------------------------------------------------------------------------------------------


def publish_all(publishers: list[Publisher], step: int, ranks: list[int]) -> list[str]:
    def publish(rank: int) -> str:
        try:
            return str(publishers[rank].publish({f"w{rank}": ones(2, step)}, step=step).version)
        except WeightsError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(publish, ranks))


def test_a_rank_that_missed_a_step_is_in_the_next_one() -> None:
    folder = MemoryFolder()
    publishers = [
        Publisher(folder, rank=rank, ranks=2, run="one", patience=1.0) for rank in range(2)
    ]
    assert publish_all(publishers, 1, [0, 1]) == ["1", "1"]
    (said,) = publish_all(publishers, 2, [0])
    assert "rank 1 of 2 has not written its part of step 2 in 1 s" in said
    assert publish_all(publishers, 3, [0, 1]) == ["2", "2"]
    publishers[1]._team.begin(2)  # a call of step 2, too, before the trainer goes back to it
    assert publish_all(publishers, 2, [0, 1]) == ["3", "3"]
    assert publish_all(publishers, 3, [0, 1]) == ["4", "4"]
    found: State = {}
    subscriber = Subscriber(folder)
    subscriber.fetch()
    subscriber.apply_(found)
    assert [found["w0"][0], found["w1"][0]] == [3.0, 3.0]


def test_without_steps_the_error_says_what_helps() -> None:
    publisher = Publisher(MemoryFolder(), rank=0, ranks=2, run="one", patience=0.1)
    with pytest.raises(WeightsError, match=r"call 1 of publish\(\).*give publish\(\) a step="):
        publisher.publish({"w": ones()})


class CountingFolder(MemoryFolder):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        data = super().read(name, begin, end)
        self.read_bytes += len(data)
        return data


def start(folder: MemoryFolder, run: str, states: list[State]) -> None:
    publishers = [
        Publisher(folder, rank=rank, ranks=len(states), run=run) for rank in range(len(states))
    ]
    with ThreadPoolExecutor(len(states)) as pool:
        list(pool.map(lambda one: one[0].publish(one[1]), zip(publishers, states, strict=True)))


def test_a_rank_that_starts_again_reads_its_own_tensors_alone() -> None:
    folder = CountingFolder()
    states: list[State] = [{f"w{rank}": ones(100_000, rank), "tie": ones(3)} for rank in range(4)]
    start(folder, "one", states)
    folder.read_bytes = 0
    for rank, state in enumerate(states):
        state[f"w{rank}"][0] += 1
    start(folder, "two", states)
    assert folder.read_bytes < 1.2 * 4 * 400_000
    found: State = {}
    subscriber = Subscriber(folder)
    subscriber.fetch()
    subscriber.apply_(found)
    assert all(torch.equal(found[f"w{rank}"], states[rank][f"w{rank}"]) for rank in range(4))


def test_parts_that_were_damaged_are_noticed_where_few_tensors_are_read() -> None:
    folder = MemoryFolder()
    Publisher(folder).publish({"a": ones(64), "b": ones(64, 2), "c": ones(64, 3), "d": ones(0)})
    (part,) = [name for name in folder.files if name.endswith(".safetensors")]
    whole = folder.files[part]

    def load(*keys: str) -> str:
        try:
            found = Store(folder, 0.0, 1).follow(None, keys)
        except WeightsError as error:
            return str(error)
        blobs = {key: np.frombuffer(blob, "f4") for key, blob in found.blobs.items()}
        assert blobs.keys() == found.entries.keys() == set(keys)
        assert all((blob == "dabc".index(key)).all() for key, blob in blobs.items())
        return ""

    everything = [("a",), ("b", "d"), ("c", "a"), ("a", "b", "c", "d")]
    assert [load(*keys) for keys in everything] == [""] * 4
    folder.files[part] = whole[:-1] + b"\x01"  # in c, or in what lies last
    said = [load(*keys) for keys in everything]
    assert all("bytes were changed" in text for text in said if text)
    assert sum(map(bool, said)) == 2
    folder.files[part] = whole[:-4]
    assert load("a", "b", "c", "d")


# Files that are late, refused or left behind -----------------------------------------------------


def test_a_version_that_is_asked_for_may_be_late(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    publisher.publish({"w": ones()})
    subscriber = Subscriber(tmp_path, patience=30.0)

    def publish_late() -> None:
        time.sleep(0.5)
        publisher.publish({"w": ones(4, 2)})

    late = threading.Thread(target=publish_late)
    late.start()
    fetched = subscriber.fetch(2)
    late.join()
    assert fetched is not None
    assert fetched.version == 2
    with pytest.raises(MissingVersionError, match=r"newest is 2, and it did not come in 0\.2 s"):
        Subscriber(tmp_path, patience=0.2).fetch(3)


class Refusing:
    """A file system of fsspec that answers 403 for what is absent, and lists nothing."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def cat_file(self, path: str, start: int | None, end: int | None) -> bytes:
        if path not in self.files:
            raise PermissionError("Forbidden")
        return self.files[path]  # whole: it has no ranges

    def ls(self, path: str, detail: bool) -> list[str]:
        raise PermissionError("Forbidden")

    def invalidate_cache(self) -> None:
        """It keeps none."""


def test_a_server_that_refuses_what_is_absent_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemoryFolder()
    publisher = Publisher(source)
    folder = RemoteFolder("memory://policy")
    monkeypatch.setattr(folder, "files", Refusing({}))
    subscriber = Subscriber(folder, patience=0.1)
    with pytest.raises(WeightsError, match="has no version yet, or may not be read: Forbidden"):
        subscriber.fetch()
    found: State = {}
    for version in range(1, 4):
        publisher.publish({"w": ones(4, version), "v": ones(50)})
        files = {f"{folder._path}/{name}": data for name, data in source.files.items()}
        monkeypatch.setattr(folder, "files", Refusing(files))
        subscriber.fetch()
        assert subscriber.apply_(found).version == version
    assert Store(folder, 0.1, 1).follow(None, ["w"]).blobs.keys() == {"w"}
    monkeypatch.setattr(folder, "files", Refusing({}))  # rights that have ended
    with pytest.raises(WeightsError, match="may not be read"):
        subscriber.fetch()


def test_what_killed_publishers_left_is_pruned(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, numpy as np\n"
        "from gradwire.weights import Publisher\n"
        "publisher = Publisher(sys.argv[1])\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)\n"
        "publisher.publish({'w': np.ones(1000)})\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2
    assert prune(tmp_path, 1) == []  # perhaps they are being written
    for name in left:
        os.utime(tmp_path / name, (0, 0))
    assert sorted(prune(tmp_path, 1)) == left
    assert not os.listdir(tmp_path)


# Memory ------------------------------------------------------------------------------------------


def test_manifests_in_memory_are_bounded_by_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.weights.store._KEPT", 30)
    folder = MemoryFolder()
    publisher = Publisher(folder, anchor_every=0)
    state = {f"w{i}": ones() for i in range(8)}
    for version in range(9):
        state["w0"][0] = version
        publisher.publish(state)
    store = Store(folder, 0.0, 1)
    update = store.follow(None)
    assert update.version == 9
    assert len(store._manifests) <= 3
    assert len(update.blobs) == 8


@pytest.mark.parametrize("grows", [False, True])
def test_nothing_of_a_version_stays_in_memory(tmp_path: Path, grows: bool) -> None:
    publisher = Publisher(tmp_path / "store")
    subscriber = Subscriber(tmp_path / "store", local=tmp_path / "local")
    for version in range(2):
        publisher.publish({"w": ones(1000 + grows * version, version)})
        subscriber.fetch()
        subscriber.apply_()
    assert subscriber._files is None
    assert subscriber._pending is None
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert not [line for line in mapped if str(tmp_path) in line and "(deleted)" in line]
