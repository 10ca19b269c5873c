"""The short form of run_faults.py: a few cells, and what is read and written of them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cells import look_at_checkpoints, read_output, run_cell
from faults import BY_NAME, FAULTS, NONE, Must
from flipping_switch import flip_in_segment
from judge import Outcome, Seen, blamed
from reliability_page import WAYS, write_tables
from run_faults import why_not
from running import Forks
from selection import long

WAY = "hook-ring"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    process = Forks()
    yield process
    process.close()


@pytest.fixture(scope="module")
def model(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run without a fault."""
    outcome = run_cell(WAY, NONE, forks, tmp_path_factory.mktemp("none") / "cell", None, None)
    assert outcome.problems == []
    digest = outcome.ranks[0].digest
    assert digest is not None
    return digest


@pytest.mark.parametrize("name", ["killed", "bit-flipped", *long("exception", "link-cut")])
def test_a_fault_is_survived_or_reported(
    forks: Forks, model: str, tmp_path: Path, name: str
) -> None:
    fault = BY_NAME[name]
    if reason := why_not(WAY, fault, Path()):
        pytest.skip(reason)
    outcome = run_cell(WAY, fault, forks, tmp_path / "cell", model, None)
    assert outcome.problems == [], outcome


def test_servers_go_on_without_a_worker(forks: Forks, tmp_path: Path) -> None:
    outcome = run_cell("servers-go-on", BY_NAME["killed"], forks, tmp_path / "cell", None, None)
    assert outcome.problems == [], outcome
    assert [seen.status for seen in outcome.ranks] == [0, 0, -9, 0]


@pytest.mark.parametrize("way", ["hsdp", "hsdp-rank-1"])
def test_replicas_of_shards_name_the_rank_that_is_gone(
    forks: Forks, tmp_path: Path, way: str
) -> None:
    """One of the others shares only PyTorch's own communication with it, and one none."""
    outcome = run_cell(way, BY_NAME["killed"], forks, tmp_path / "cell", None, None)
    assert outcome.problems == [], outcome


def test_the_error_of_an_output_is_found() -> None:
    lines = [
        "/a/file.py:3: WorkerLostWarning: rank 1 is gone",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "train.py", line 3',
        "[rank0]: gradwire.torch.errors.PeerLostError: ranks 1, 3 are gone; rank 0, step 3",
        "gradwire: rank 3 sent nothing",
    ]
    said, warned = read_output(lines)
    assert said is not None
    assert said.startswith("gradwire.torch.errors.PeerLostError")
    assert blamed(said) == {1, 3}
    assert warned == ["WorkerLostWarning: rank 1 is gone"]


def test_a_flipped_segment_has_the_right_checksum() -> None:
    def checksum(frame: bytes) -> int:
        length = len(frame) - 34
        pseudo = frame[26:34] + b"\0\x06" + length.to_bytes(2)
        words = pseudo + frame[34:] + b"\0" * (length % 2)
        total = sum(int.from_bytes(words[i : i + 2]) for i in range(0, len(words), 2))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        return ~total & 0xFFFF

    payload = bytes(range(256)) * 2 + b"\x07"
    ip = b"\x45\0" + (40 + len(payload)).to_bytes(2) + b"\0" * 5 + b"\x06\0\0"
    addresses = bytes([10, 77, 0, 3, 10, 77, 0, 1])
    frame = bytearray(b"\0" * 12 + b"\x08\0" + ip + addresses)
    frame += b"\0" * 12 + b"\x50" + b"\0" * 7 + payload
    frame[50:52] = checksum(bytes(frame)).to_bytes(2)
    assert checksum(bytes(frame)) == 0
    changed = flip_in_segment(bytes(frame), addresses[:4])
    assert changed is not None
    assert checksum(changed[0]) == 0
    differing = [i for i in range(54, len(frame)) if changed[0][i] != frame[i]]
    assert differing == [54 + changed[1]]
    assert flip_in_segment(bytes(frame), addresses[4:]) is None


def test_the_tables_show_what_was_run_and_what_was_not(tmp_path: Path) -> None:
    folder = tmp_path / WAY
    folder.mkdir()
    finished = Seen(0, 9.0, None, [], "abc", 200)
    stopped = Seen(1, 3.0, "PeerLostError: rank 2 is gone", [], None, 100, 1.2)
    victim = Seen(-9, 0.1, None, [], None, 100)
    without = Outcome(WAY, "none", 2, 30.0, 200, [finished] * 4)
    killed = Outcome(WAY, "killed", 2, 30.0, 100, [stopped, stopped, victim, stopped])
    wrong = Outcome(WAY, "link-cut", 2, 30.0, 100, [replace(finished, digest="x")] * 4)
    for outcome in (without, killed, wrong):
        (folder / f"{outcome.fault}.json").write_text(json.dumps(outcome.as_dict()))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables: begin -->\n<!-- tables: end -->\nafter\n")
    write_tables(tmp_path, page)
    first = page.read_text()
    assert f"| {WAYS[WAY]} | stops, 1.2 s | not run |" in first
    assert "**WRONG: the model is not that of the run without the fault**" in first
    assert "| `PeerLostError`: rank 2 | 1.2 s | 1 | signal 9 | 0.1 s | -9 |" in first
    write_tables(tmp_path, page)
    assert page.read_text() == first
    assert first.startswith("before\n")
    assert first.endswith("after\n")
    write_tables(tmp_path / "nowhere", page)  # ways without results keep their rows
    assert page.read_text() == first
    row = next(line for line in first.splitlines() if line.startswith(f"| {WAYS[WAY]} | stops"))
    page.write_text(first.replace(row, row.replace("1.2 s", "9.9 s")))
    write_tables(tmp_path, page)
    assert page.read_text() == first


def test_a_checkpoint_that_is_cut_off_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "0"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "50.pt", "w") as file:
        file.writestr("values", bytes(1000))
    (folder / "100.pt").write_bytes((folder / "50.pt").read_bytes()[:-30])
    (folder / ".150.pt.part").touch()  # what a kill leaves, which nobody loads
    assert look_at_checkpoints(tmp_path) == (2, ["checkpoints/0/100.pt"])


def test_each_fault_has_its_own_name() -> None:
    assert len(BY_NAME) == len(FAULTS) + 1
    assert {fault.must for fault in FAULTS} == set(Must)
