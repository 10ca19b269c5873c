"""One bit of a message is flipped on its way: an error names the sender and what was damaged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, Failed, free_port
from damage import (
    IN_THE_REST,
    Damage,
    Excess,
    Replacement,
    make_replicas,
    run_behind,
    run_damaged,
    train_damaged,
)
from gradwire.torch.network.transport import Kind
from member_jobs import Fleet, Plan
from server_jobs import Job

SERVER = 2
STALE: dict[str, Any] = {"staleness": 1}
BUFFERED: dict[str, Any] = {"buffers_from": 0, "buffers_every": 2}
BACKUP: dict[str, Any] = {"backup_workers": 1, "history": 1}
# What is damaged, arguments of ServerOptimizer, who may notice it.
CASES: dict[str, Any] = {
    "model": (Damage(SERVER, Kind.MODEL), {}, 0),
    "end of the model": (Damage(SERVER, Kind.MODEL, IN_THE_REST, 1), {}, 1),
    "last model": (Damage(SERVER, Kind.MODEL, 70, 2), {}, 0, 1),
    "part of a model": (Damage(SERVER, Kind.MODEL, 70), {"barrier": "tensor"}, 0),
    "buffers of a worker": (Damage(0, Kind.BUFFERS), BUFFERED, SERVER),
    "buffers of the server": (Damage(SERVER, Kind.BUFFERS), BUFFERED, 0),
    "options": (Damage(1, Kind.OPTIONS, 45, 2), STALE, SERVER),
    "setup": (Damage(1, Kind.HELLO), {}, 0),
    "length": (Damage(1, Kind.PACKET, 0), {}, SERVER),
    "long length": (Damage(1, Kind.PACKET, 4), {}, SERVER),
    "kind": (Damage(SERVER, Kind.PACKET, 7), {}, 0),
    "part": (Damage(SERVER, Kind.PACKET, 5), {"barrier": "tensor"}, 0),
    "checksum": (Damage(SERVER, Kind.MODEL, 13), {}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_between_workers_and_servers(fragile_cluster: Cluster, case: str) -> None:
    damage, arguments, *receivers = CASES[case]
    job = Job(versions=6, decay=0.9, arguments=arguments)
    check(fragile_cluster, run_damaged, job, damage, set(receivers))


def test_a_flipped_bit_of_the_model_for_a_worker_that_is_behind(fragile_cluster: Cluster) -> None:
    job = Job(versions=60, arguments={**BACKUP, "codec": "raw"})
    check(fragile_cluster, run_behind, job, Damage(SERVER, Kind.CATCH_UP, IN_THE_REST), {0, 1})


def check(cluster: Cluster, run: Any, job: Job, damage: Damage, receivers: set[int]) -> None:
    cluster.start(3, run, job, damage)
    ended = cluster.collect(range(3), seconds=120)
    said = {rank: answer.message for rank, answer in ended.items() if isinstance(answer, Failed)}
    noticed = [rank for rank, text in said.items() if text.startswith("DamagedMessageError: ")]
    assert len(noticed) == 1, ended
    assert set(noticed) <= receivers
    in_word = damage.place < 12
    what = "the first bytes of its message" if in_word else f"its {damage.kind.label} of "
    prefix = f"DamagedMessageError: rank {noticed[0]}: rank {damage.sender} sent {what}"
    assert said.pop(noticed[0]).startswith(prefix)
    if len(receivers) == 1 and "backup_workers" not in job.arguments:
        assert any(f"rank {noticed[0]} stopped: Damaged" in text for text in said.values()), said


@pytest.mark.parametrize("place", [20, IN_THE_REST])
def test_a_flipped_bit_of_the_replicas_first_model(fragile_cluster: Cluster, place: int) -> None:
    fragile_cluster.start(3, make_replicas, Damage(0, Kind.TENSORS, place, 1))
    ended = fragile_cluster.collect(range(3), seconds=60)
    assert isinstance(ended[2], Failed)
    assert "DamagedMessageError: rank 2: rank 0 sent its tensors of" in ended[2].message


def test_a_flipped_bit_of_the_model_for_a_rank_that_joins(tmp_path: Path) -> None:
    """The ranks that are members go on."""
    fleet = Fleet()
    try:
        plan = Plan((2, 2), ranks=1, folder=str(tmp_path), pause=0.1)
        damage = Damage(0, Kind.TENSORS, IN_THE_REST)
        fleet.start(0, plan, partial(train_damaged, damage))
        while not list(tmp_path.glob("1-*.npz")):
            time.sleep(0.1)
        fleet.start(1, plan)
        (refused, alone) = fleet.collect(1, 0)
        assert "DamagedMessageError: rank 1: rank 0 sent its tensors" in refused.error
        assert (alone.error, alone.members) == ("", (0,))
    finally:
        fleet.close()


# What is replaced, arguments of ServerOptimizer, who must notice it, what it says.
REPLACED: dict[str, Any] = {
    "a model that ends early": (
        Replacement(SERVER, Kind.MODEL, less=4, number=1),
        {},
        1,
        f"the tensors of rank {SERVER} and their version have ",
    ),
    "a model without version": (
        Replacement(SERVER, Kind.MODEL, b"abc"),
        {},
        0,
        "it has 3 bytes; ",
    ),
    "a part of a model": (
        Replacement(SERVER, Kind.MODEL, b"", number=1),
        {"barrier": "tensor"},
        1,
        "it has 0 bytes; ",
    ),
    "options without version": (
        Replacement(1, Kind.OPTIONS, b"1234567"),
        {},
        SERVER,
        "it has 7 bytes, and begins with a version of 8",
    ),
    "options that are no JSON": (
        Replacement(1, Kind.OPTIONS, bytes(8) + b"\xff{"),
        STALE,
        SERVER,
        "it holds no options of parameter groups as JSON (",
    ),
    "an option of another type": (
        Replacement(1, Kind.OPTIONS, bytes(8) + b'[{"lr": "x"}]'),
        {"pulls": "gradients"},
        SERVER,
        "it says that lr of group 0 is 'x'",
    ),
    "buffers of a worker": (
        Replacement(0, Kind.BUFFERS, less=1),
        BUFFERED,
        SERVER,
        "it has 11 bytes, and the model's buffers 12",
    ),
    "buffers of the server": (
        Replacement(SERVER, Kind.BUFFERS, b"", number=1),
        BUFFERED,
        1,
        "it has 0 bytes, and the model's buffers 12",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_a_message_of_other_content_is_refused_and_its_sender_named(
    fragile_cluster: Cluster, case: str
) -> None:
    replacement, arguments, receiver, why = REPLACED[case]
    job = Job(versions=6, decay=0.9, arguments=arguments)
    fragile_cluster.start(3, run_damaged, job, replacement)
    error = fragile_cluster.collect(range(3), seconds=120)[receiver]
    assert isinstance(error, Failed), error
    assert error.message.startswith(
        f"PeerMismatchError: rank {receiver} can't read a message ({replacement.kind.label}) of "
        f"rank {replacement.sender}: "
    ), error.trace
    assert why in error.message
    assert "different versions of gradwire" in error.message


# What is too long, arguments of ServerOptimizer, who must notice it.
EXCESSES: dict[str, Any] = {
    "push": (Excess(1, Kind.PACKET, 1 << 20), {}, SERVER),
    "pull": (Excess(SERVER, Kind.PACKET, 1 << 20), {}, 0),
    "model": (Excess(SERVER, Kind.MODEL, number=1), {}, 1),
    "buffers of a worker": (Excess(0, Kind.BUFFERS), BUFFERED, SERVER),
    "buffers of the server": (Excess(SERVER, Kind.BUFFERS), BUFFERED, 0),
    "leave": (Excess(1, Kind.LEAVE), {}, SERVER),
}


@pytest.mark.parametrize("case", EXCESSES)
def test_a_message_above_its_limit(fragile_cluster: Cluster, case: str) -> None:
    excess, arguments, receiver = EXCESSES[case]
    job = Job(versions=6, decay=0.9, arguments=arguments)
    fragile_cluster.start(3, run_damaged, job, excess)
    check_refused(fragile_cluster.collect(range(3), seconds=120), excess, receiver)


def check_refused(ended: dict[int, Any], excess: Excess, receiver: int) -> None:
    assert isinstance(ended[receiver], Failed), ended
    said = ended[receiver].message
    who = f"PeerMismatchError: rank {receiver}: rank {excess.sender} states a {excess.kind.label}"
    assert said.startswith(f"{who} of "), said
    length, limit = (int(number) for number in re.findall(r"of (?:at most )?(\d+)", said)[:2])
    assert limit < length <= limit + excess.more


def test_a_first_model_above_its_limit(fragile_cluster: Cluster) -> None:
    excess = Excess(0, Kind.TENSORS, number=1)
    fragile_cluster.start(3, make_replicas, excess)
    check_refused(fragile_cluster.collect(range(3), seconds=60), excess, 2)


SCRIPT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
from damage import Damage
from gradwire.torch import ServerOptimizer
from gradwire.torch.network.transport import Kind

dist.init_process_group("gloo")
model = torch.nn.Linear(300, 40)
optimizer = ServerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if optimizer.is_server:
    Damage(1, Kind.MODEL, 100).begin()
    optimizer.serve()
optimizer.connect()
while optimizer.version < 20:
    model(torch.ones(2, 300)).square().mean().backward()
    optimizer.step()
optimizer.close()
"""


def test_a_program_ends_with_an_error() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(folder=str(Path(__file__).parent))],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | place | {"RANK": rank},
        )
        for rank in "01"
    ]
    said = [rank.communicate(timeout=180)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "DamagedMessageError: rank 0: rank 1 sent its model of 48168 bytes" in said[0]
