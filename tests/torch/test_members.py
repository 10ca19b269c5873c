"""LocalSteps(on_lost="continue"): ranks die, fall silent and join, and the others go on."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.optim import SGD

from cluster import free_port
from gradwire.torch import LocalSteps
from gradwire.torch.errors import CommunicationError
from gradwire.torch.members.generations import (
    Generations,
    MemberReport,
    Roster,
    follow,
    found_training,
)
from gradwire.torch.members.heartbeat import Heartbeat, State
from gradwire.torch.network.sealed_store import StoreAccess, StoreUnreachableError
from gradwire.torch.network.transport import only_here
from gradwire.torch.options import Members, grouped
from member_jobs import (
    GATED,
    PLAIN,
    Ended,
    Fleet,
    Plan,
    ask_and_leave,
    host_store,
    save_or_resume,
    train_unevenly,
)
from runs import adamw, sgd
from selection import long
from training import make_model


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    processes = Fleet()
    yield processes
    processes.close()


def check_accounts(folder: Path, but: int | None = None) -> dict[int, int]:
    """In each exchange, what is applied is the average of what its ranks gave and owed before,
    without what they owe after it. Returns how many ranks took part in each. `but`: an exchange of
    which a part is not known."""
    accounts: defaultdict[int, dict[int, Any]] = defaultdict(dict)
    for path in folder.glob("*.npz"):
        exchange, member = map(int, path.stem.split("-"))
        accounts[exchange][member] = np.load(path)
    for exchange, ranks in sorted(accounts.items()):
        applied = next(iter(ranks.values()))["applied"]
        due = np.zeros_like(applied)
        for member, entry in ranks.items():
            np.testing.assert_array_equal(entry["applied"], applied)
            before = accounts.get(exchange - 1, {}).get(member)
            due += (entry["given"] - entry["push"]) / len(ranks) - entry["pull"]
            if before is not None:
                due += before["push"] / len(ranks) + before["pull"]
        if exchange != but:
            np.testing.assert_allclose(due, applied, atol=2e-6, err_msg=f"exchange {exchange}")
        assert np.abs(applied).max() > 1e-4
    return {exchange: len(ranks) for exchange, ranks in sorted(accounts.items())}


def check_equal(ended: list[Ended], members: tuple[int, ...], lost: int) -> None:
    for each in ended:
        assert each.error == ""
        assert each.digest == ended[0].digest
        assert (each.exchanges, each.generation) == (ended[0].exchanges, ended[0].generation)
        assert each.members == members
        assert len(each.lost) == lost
        assert len(each.warnings) == (lost > 0)
        assert each.sessions == 1


@pytest.mark.parametrize(
    ("number", "deed", "options"),
    [
        (0, "kill", PLAIN),
        (2, "kill in push", GATED),
        (0, "kill in pull", PLAIN),
        *long(
            *((2, "kill", PLAIN), (0, "kill in push", PLAIN), (2, "kill in pull", PLAIN)),
            *((2, "kill in push", PLAIN), (0, "kill in pull", GATED)),
        ),
    ],
)
def test_a_rank_dies_and_the_others_go_on(
    fleet: Fleet, tmp_path: Path, deed: str, number: int, options: dict[str, Any]
) -> None:
    """If it dies in a pull, one rank has finished the exchange, and another one has not."""
    plan = Plan((1, 4), options=options, folder=str(tmp_path))
    for each in range(3):
        fleet.start(each, replace(plan, at=3, deed=deed) if each == number else plan)
    fleet.wait_killed(number)
    ended = fleet.collect(*({0, 1, 2} - {number}))
    (gone,) = ended[0].lost
    check_equal(ended, tuple(sorted({0, 1, 2} - {gone})), lost=1)
    text = f"generation 1: member {gone} is gone, with residual and unsent changes; 2 go on"
    assert text in ended[0].warnings[0]
    assert f"in generation 1, lost member {gone}" in ended[0].report
    assert sum(each.caught_up for each in ended) == (deed == "kill in pull")
    if deed == "kill in pull":  # what the dead rank gave to the last exchange is unknown
        assert [len(list(tmp_path.glob(f"{n}-*.npz"))) for n in range(5)] == [3, 3, 3, 2, 2]
        check_accounts(tmp_path, but=3)
        for after in tmp_path.glob("3-*.npz"):  # who takes a result over owes other values, too
            before = tmp_path / after.name.replace("3-", "2-")
            assert not np.array_equal(np.load(after)["push"], np.load(before)["push"])
    else:
        assert list(check_accounts(tmp_path).values()) == [3, 3, 3, 2, 2, 2, 2]


def test_a_loss_in_synchronize_mixes_nothing(fleet: Fleet) -> None:
    """Also where a rank takes over another one's result."""
    options = {"codec": "raw", "every": 4, "mix": 0.5}
    plan = Plan((1, 1), options=options, synchronize_at=2)
    for each in range(3):
        fleet.start(each, replace(plan, at=2, deed="kill in pull") if each == 2 else plan)
    fleet.wait_killed(2)
    ended = fleet.collect(0, 1)
    assert sum(each.caught_up for each in ended) == 1
    check_equal(ended, ended[0].members, lost=1)


STREAMING = {
    "codec": "raw",
    "every": 4,
    "fragments": 2,
    "delay": 1,
    "mix": 0.5,
    "outer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        Plan((2, 3), adamw, {"codec": "3lc:s=1", "every": 2, "clip_norm": 1.0}),
        Plan((2, 3), adamw, {"codec": "3lc:s=1", "every": 4, "delay": 2}),
        Plan((2, 3), sgd, STREAMING),
        Plan((2, 3), sgd, {"exchange": "terngrad", "every": 2}),
        Plan((2, 3), sgd, {"exchange": "ring", "codec": "3lc:s=1", "every": 1}),
        Plan((2, 3), sgd, {"exchange": "broadcast", "codec": "topk:ratio=0.1", "every": 2}),
    ],
    ids=["adamw", "delay", "streaming", "terngrad", "ring", "broadcast"],
)
def test_all_ways_to_exchange_go_on(fleet: Fleet, plan: Plan) -> None:
    for each in range(3):
        fleet.start(each, replace(plan, at=3, deed="kill in push") if each == 1 else plan)
    fleet.wait_killed(1)
    fleet.start(3, plan)
    ended = fleet.collect(0, 2, 3)
    for rank in ended:
        assert (rank.error, rank.digest) == ("", ended[0].digest)
        assert rank.members == ended[0].members
    assert len(ended[0].members) == 3
    assert 3 in ended[0].members


def test_two_of_four_die_at_once(fleet: Fleet, tmp_path: Path) -> None:
    plan = Plan((1, 3), ranks=4, folder=str(tmp_path))
    for each in range(4):
        fleet.start(each, replace(plan, at=2, deed="kill") if each in (0, 3) else plan)
    ended = fleet.collect(1, 2)
    check_equal(ended, ended[0].members, lost=2)
    assert list(check_accounts(tmp_path).values()) == [4, 4, 2, 2, 2]


def test_a_stopped_rank_is_left_and_told_so(fleet: Fleet) -> None:
    plan = Plan((1, 3))
    for each in range(3):
        fleet.start(each, replace(plan, at=2, deed="stop") if each == 1 else plan)
    ended = fleet.collect(0, 2)
    check_equal(ended, ended[0].members, lost=1)
    os.kill(fleet.pid(1), signal.SIGCONT)
    (awake,) = fleet.collect(1)
    assert awake.error.startswith("ExpelledError: member")
    assert "silent for more than 12 s (lost_after)" in awake.error
    assert "Make a new LocalSteps" in awake.error


def test_a_rank_that_computes_for_long_is_waited_for(fleet: Fleet) -> None:
    plan = Plan((0, 2), options={**PLAIN, "every": 1, "lost_after": 2.0})
    fleet.start(0, plan)
    fleet.start(1, plan)
    fleet.start(2, replace(plan, pause=5.0))
    check_equal(fleet.collect(0, 1, 2), (0, 1, 2), lost=0)


def test_a_process_joins_without_a_loss(fleet: Fleet, tmp_path: Path) -> None:
    plan = Plan((1, 3), ranks=2, folder=str(tmp_path), pause=0.05)
    fleet.start(0, plan)
    fleet.start(1, plan)
    while not list(tmp_path.glob("1-*.npz")):
        time.sleep(0.1)
    fleet.start(2, plan)
    ended = fleet.collect(0, 1, 2)
    check_equal(ended, (0, 1, 2), lost=0)
    counts = list(check_accounts(tmp_path).values())
    assert counts == sorted(counts)
    assert counts[-3:] == [3, 3, 3]


def test_a_rank_dies_and_another_process_takes_its_place(fleet: Fleet, tmp_path: Path) -> None:
    plan = Plan((2, 3), folder=str(tmp_path))
    for each in range(3):
        fleet.start(each, replace(plan, at=2, deed="kill") if each == 0 else plan)
    fleet.wait_killed(0)
    fleet.start(3, plan)
    ended = fleet.collect(1, 2, 3)
    assert len({each.digest for each in ended}) == 1
    assert {3} < set(ended[0].members)
    assert len(ended[0].members) == 3
    counts = list(check_accounts(tmp_path).values())
    assert (counts[0], min(counts), counts[-1]) == (3, 2, 3)


def test_a_process_takes_no_more_than_a_members_state(fleet: Fleet, tmp_path: Path) -> None:
    plan = Plan((2, 2), ranks=2, folder=str(tmp_path), pause=0.05)
    for number in (0, 1):  # either may be the source
        fleet.start(number, replace(plan, at=0, deed="bloat"))
    while not list(tmp_path.glob("1-*.npz")):
        time.sleep(0.1)
    fleet.start(2, plan)
    (refused,) = fleet.collect(2)
    assert re.search(
        r"^PeerMismatchError: rank 2: rank [01] states a tensors of 1\d{6} bytes, and one of at "
        r"most \d{6} can come here: .* At most that many bytes have this rank's model, the states "
        r"of its optimizer \(SGD\) and what all members share: give all members the same "
        r"optimizer$",
        refused.error,
    ), refused.error
    check_equal(fleet.collect(0, 1), (0, 1), lost=1)


@pytest.mark.long
def test_a_process_that_leaves_when_it_is_let_in_is_let_in_once(
    fleet: Fleet, tmp_path: Path
) -> None:
    """The others waited for it again and again."""
    options = {**PLAIN, "timeout": 10.0}
    plan = Plan((2, 2), ranks=2, pause=0.05, options=options, folder=str(tmp_path))
    fleet.start(0, plan)
    fleet.start(1, plan)
    while not list(tmp_path.glob("1-*.npz")):
        time.sleep(0.1)
    fleet.start(2, replace(plan, until=(1, 0)), ask_and_leave)
    ended = fleet.collect(0, 1)
    check_equal(ended, (0, 1), lost=1)
    assert ended[0].generation == 2


def test_a_process_with_other_settings_is_refused_alone(fleet: Fleet, tmp_path: Path) -> None:
    plan = Plan((0, 8), ranks=2, folder=str(tmp_path), pause=0.2)
    fleet.start(0, plan)
    fleet.start(1, plan)
    while not list(tmp_path.glob("0-*.npz")):
        time.sleep(0.1)
    fleet.start(2, replace(plan, options={**PLAIN, "codec": "3lc:s=1"}))
    (refused,) = fleet.collect(2)
    assert refused.error.startswith("PeerMismatchError: this process can't join: it has '")
    assert "push 3lc:s=1" in refused.error
    assert "the members have '" in refused.error
    ended = fleet.collect(0, 1)
    check_equal(ended, (0, 1), lost=0)
    assert ended[0].generation == 0


def test_too_few_ranks_stop(fleet: Fleet) -> None:
    plan = Plan((9, 9), min_ranks=3)
    for each in range(3):
        fleet.start(each, replace(plan, at=2, deed="kill") if each == 1 else plan)
    for ended in fleet.collect(0, 2):
        assert re.match(r"PeerLostError: members \[\d\] are gone, and 2 are left", ended.error)
        assert "min_ranks=3: start again from a checkpoint" in ended.error


def test_ranks_that_step_unequally_often_are_told_so(fleet: Fleet) -> None:
    for number in range(2):
        fleet.start(number, Plan((0, 1), ranks=2), train_unevenly)
    for number, ended in enumerate(fleet.collect(0, 1)):
        assert ended.error.startswith("PeerMismatchError: this rank exchanges the changes of ")
        assert f"of {2 - number} local steps, and others those of more or fewer" in ended.error


def test_the_end_of_the_store_is_named() -> None:
    port = free_port()
    fleet = Fleet(port)
    try:
        fleet.start(port, Plan((9, 9)), host_store)
        plan = Plan((9, 9), ranks=2, at=2, deed="stop")
        fleet.start(0, plan)
        fleet.start(1, plan)
        for number in (0, 1):
            _wait_until_stopped(fleet.pid(number))
        os.kill(fleet.pid(port), signal.SIGKILL)
        for number in (0, 1):
            os.kill(fleet.pid(number), signal.SIGCONT)
        for ended in fleet.collect(0, 1):
            assert "StoreLostError: the store where the members meet" in ended.error
            assert "start again from a checkpoint, with a new store" in ended.error
    finally:
        fleet.close()


def _wait_until_stopped(pid: int) -> None:
    end = time.monotonic() + 120
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < end, f"process {pid} did not stop"
        time.sleep(0.1)


def test_an_error_of_the_heartbeat_is_raised_as_itself() -> None:
    """The thread ended, and the others took this member for dead."""
    alone = Members(on_lost="continue", store=HashStore(), ranks=1, lost_after=1.0)
    members = Generations(alone, 20.0, "terms")
    members.join()
    told = threading.Event()
    members.watch(told.set)
    with mock.patch.object(Heartbeat, "_look", side_effect=ValueError("no counter")):
        assert told.wait(20)
    with pytest.raises(CommunicationError, match=r"its heartbeat.* ended with ValueError: no co"):
        members.join()
    with pytest.raises(CommunicationError, match="no counter"):
        members.check()


class Owner:
    """In a cycle, which Python drops in whichever thread looks for cycles."""

    def __init__(self, members: Generations) -> None:
        self.itself = self
        weakref.finalize(self, only_here(members.leave))


@pytest.mark.parametrize("method", ["_beat", "_look"])
def test_a_member_that_is_dropped_in_its_own_heartbeat_leaves(method: str) -> None:
    """The thread waited for the lock of `_beat`, which it had, and no other could look for cycles
    any more."""
    members = Generations(
        Members(on_lost="continue", store=HashStore(), ranks=1, lost_after=2.0), 20.0, "terms"
    )
    members.join()
    heartbeat, original = members._beat, getattr(Heartbeat, method)

    def collect(self: Heartbeat, *given: Any) -> Any:
        gc.collect()
        return original(self, *given)

    gc.disable()
    try:
        Owner(members)
        with mock.patch.object(Heartbeat, method, collect):
            heartbeat._thread.join(20)
        assert not heartbeat._thread.is_alive()
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "gradwire-end":
            thread.join(20)
    assert heartbeat._state is State.LEFT


def test_an_error_of_a_call_of_the_store_is_raised_as_itself() -> None:
    access = StoreAccess()

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(KeyError, match="no such key"):
        access.ask(lambda: fail(KeyError("no such key")))
    with pytest.raises(StoreUnreachableError, match=r"the store is gone$"):
        access.ask(lambda: fail(RuntimeError("the store is gone\nand a trace")))


def test_a_checkpoint_goes_on_where_as_many_ranks_begin_again(tmp_path: Path) -> None:
    """The state is saved between two exchanges; the last 4 steps are taken again, with a new
    store."""
    plan = Plan((0, 0), adamw, {"every": 2}, ranks=2, folder=str(tmp_path))
    digests = []
    for steps in (9, 4):
        fleet = Fleet()
        for number in range(2):
            fleet.start(number, plan, save_or_resume)
        ended = fleet.collect(0, 1)
        fleet.close()
        assert [(each.steps, each.exchanges) for each in ended] == [(steps, 4)] * 2
        digests.append({each.digest for each in ended})
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


def test_a_process_that_comes_too_late_is_told_so(fleet: Fleet) -> None:
    plan = Plan((0, 2), ranks=1)
    fleet.start(0, plan)
    fleet.collect(0)
    fleet.start(1, plan)
    (late,) = fleet.collect(1)
    assert "PeerLostError: member 1 can't join: the members [0] of this store are gone" in (
        late.error
    )


def test_who_goes_on_follows_from_the_reports() -> None:
    begun = replace(found_training({4, 2, 7}), done=5)
    assert found_training({4, 2, 7}) == Roster(0, (2, 4, 7), 2, (4, 7), 0, 0, ())
    ahead, behind, idle = (
        MemberReport(6, 13, (1, 0)),
        MemberReport(5, 12, (2, 2)),
        MemberReport(6, 12, (0, 0)),
    )
    asking = (9,)
    # A rank that has finished more gives its model to one that has finished fewer.
    assert follow(begun, {2: behind, 4: ahead, 7: ahead}) == Roster(
        1, (2, 4, 7), 4, (2,), 6, 13, (1, 0)
    )
    # Newcomers wait while someone has unsent changes.
    assert follow(begun, {4: replace(ahead, asking=asking), 7: idle}).members == (4, 7)
    idle = replace(idle, asking=asking)
    assert follow(begun, {2: behind, 7: idle}) == Roster(1, (2, 7, 9), 7, (2, 9), 6, 12, (0, 0))
    # A newcomer alone does not know the model, unless nobody ever did more than begin.
    assert follow(begun, {2: MemberReport(None, asking=asking)}).is_over
    assert follow(found_training({1, 2}), {2: MemberReport(None, 0, (0,), asking)}).source == 2


def test_what_cannot_be_done_is_refused() -> None:
    model = make_model()

    def refuse(said: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(said)):
            LocalSteps(sgd(model.parameters()), model, **grouped(options))

    elastic: dict[str, Any] = {"on_lost": "continue", "store": HashStore(), "ranks": 2}
    refuse("on_lost is 'go on'; valid are 'stop' and 'continue'", on_lost="go on")
    refuse("needs store=, where ranks meet although any of them may die", on_lost="continue")
    refuse("ranks= is for ranks that come and go", ranks=2)
    refuse("min_ranks= and lost_after= are for ranks that come", min_ranks=2, lost_after=5.0)
    refuse("ranks is 2 and min_ranks 3", **elastic, min_ranks=3)
    refuse("lost_after is 0; it is a number of seconds", **elastic, lost_after=0)
    refuse("needs a delay below every=2", **elastic, every=2, delay=2)
    refuse("the same number of ranks on every machine", **elastic, exchange="hierarchical")
    refuse("does not go with auto:bits=1: a newcomer", **elastic, codec="auto:bits=1")
    with pytest.raises(TypeError, match=r"store is 'host:29500'; a store of torch"):
        LocalSteps(sgd(model.parameters()), model, **grouped({**elastic, "store": "host:29500"}))
