"""Subscribers of one machine that share the files of Subscriber(local=...).

Each wrote its delta into the files, so two wrote it twice: the marker said a version that was not
there.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from gradwire.files import lock_folder
from gradwire.weights import Publisher, Subscriber
from states import assert_same, state_of
from store_processes import end_of, fork


def version_in(local: Path) -> int:
    """What the marker says, after a look whether the files hold it."""
    version: int = json.loads((local / ".gradwire.json").read_text())["version"]
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(version))
    return version


@pytest.mark.parametrize("seed", range(6))
def test_subscribers_at_different_versions_share_files(tmp_path: Path, seed: int) -> None:
    """In any order of fetch() and apply_(), none gets an error, or needs a full version again."""
    choose = random.Random(seed)
    store, local = tmp_path / "store", tmp_path / "local"
    publisher = Publisher(store, base=state_of(0))
    if seed % 2:
        local.mkdir()
        safetensors.torch.save_file(state_of(0), local / "model.safetensors")
    publisher.publish(state_of(1), anchor=True)
    subscribers = [Subscriber(store, local=local) for _ in range(3)]
    models: list[dict[str, Any]] = [state_of(0) if seed % 2 else {} for _ in subscribers]
    newest, held, in_files = 1, set[int](), 0
    for _ in range(60):
        one = choose.randrange(3)
        match choose.choice(["publish", "fetch", "fetch", "apply"]):
            case "publish":
                newest += 1
                publisher.publish(state_of(newest))
            case "fetch":
                fetched = subscribers[one].fetch()
                assert fetched is None or one not in held or not fetched.is_full
                held |= {one} if seed % 2 else set()
            case "apply" if subscribers[one].apply_(models[one]).version:
                held.add(one)
                assert_same(models[one], state_of(subscribers[one].version or 0))
                assert version_in(local) >= max(in_files, subscribers[one].version or 0)
                in_files = version_in(local)
    assert in_files > 3


@pytest.mark.parametrize("with_model", [False, True])
def test_files_are_known_by_their_marker_and_not_by_times_alone(
    tmp_path: Path, with_model: bool
) -> None:
    """Clocks are coarse, and files in memory that are mapped keep their times: a delta was written
    twice."""
    store, local = tmp_path / "store", tmp_path / "local"
    publisher = Publisher(store)
    publisher.publish(state_of(1))
    one, other = subscribers = [Subscriber(store, local=local) for _ in range(2)]
    models: list[Any] = [{} if with_model else None for _ in subscribers]
    for subscriber, model in zip(subscribers, models, strict=True):
        subscriber.fetch()
        subscriber.apply_(model)
    publisher.publish(state_of(2))
    for subscriber in subscribers:
        subscriber.fetch()
    file = local / "model.safetensors"
    before = file.stat()
    one.apply_(models[0])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert other.apply_(models[1]).version == 2
    assert version_in(local) == 2


def test_a_child_that_is_forked_meanwhile_holds_no_lock(tmp_path: Path) -> None:
    """It has the handle, too: the next who wanted the files waited until the child ended."""
    with lock_folder(tmp_path):
        child = fork(lambda: time.sleep(60))
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)
        os.kill(child, signal.SIGKILL)
        end_of(child)


def follow(store: Path, local: Path, last: int, failures: Any, together: Any) -> None:
    subscriber, model = Subscriber(store, local=local), dict[str, Any]()
    together.wait()  # nobody has brought the files to a version, which the model would lack
    try:
        while (subscriber.version or 0) < last:
            if subscriber.fetch():
                version = subscriber.apply_(model).version
                assert_same(model, state_of(version or 0, 90_000))
    except BaseException as error:
        failures.put(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_subscribers_race_for_files(tmp_path: Path, kind: str) -> None:
    store, local, last = tmp_path / "store", tmp_path / "local", 12
    publisher = Publisher(store)
    publisher.publish(state_of(1, 90_000))
    context = multiprocessing.get_context("spawn")
    failures, together = context.Queue(), context.Barrier(4, timeout=120)
    make: Any = threading.Thread if kind == "threads" else context.Process
    arguments = store, local, last, failures, together
    runners = [make(target=follow, args=arguments) for _ in range(3)]
    for runner in runners:
        runner.start()
    together.wait()
    for version in range(2, last + 1):
        publisher.publish(state_of(version, 90_000))
    for runner in runners:
        runner.join(120)
        assert not runner.is_alive()
    assert failures.empty(), failures.get()
    marker = json.loads((local / ".gradwire.json").read_text())
    assert marker["version"] == last
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(last, 90_000))
