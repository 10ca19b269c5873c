"""A rank's process: `python -m gradwire_lab.train.worker`, started by the launcher, or torchrun's.

A launched worker and its launcher exchange JSON (messages.py) over the pipe that is the worker's
stdin, and so never over the network that is measured:

    launcher -> worker   {"settings", "runs", "rank", "store", "interface"}   the network is there
    worker -> launcher   {"event": "ready", "parameters", "step_seconds", "evaluation_seconds"}
    launcher -> worker   {"lost"}                                       a worker that is gone
    worker -> launcher   {"event": "begin", "run"}
    worker -> launcher   {"event": "step", "run", "step", "seconds", "loss"[, "value"]}
    worker -> launcher   {"event": "records", "records": RankRecords}   a run is done
    worker -> launcher   {"event": "error", "error": text}              and exit status 1

The end of the pipe means that the launcher is gone: the worker ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from gradwire_lab.train import messages
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.records import RankRecord
from gradwire_lab.train.settings import Run, TrainSettings

if TYPE_CHECKING:
    import torch.distributed as dist

    from gradwire_lab.train.loop import OnEvent, Trainer

# Rank 0 may evaluate for long on a slow machine while the others wait in a barrier. A worker that
# ended is noticed by its closed connections and by the launcher, not by this limit.
_PATIENCE = timedelta(hours=2)

_PR_SET_PDEATHSIG = 1


def prepare(
    settings: TrainSettings, rank: int, local_rank: int, interface: str | None, on_event: OnEvent
) -> Trainer:
    """Loads the data, and measures a worker's speed while there is no process group."""
    # loop imports gradwire.torch, which has to be imported before there is a group.
    from gradwire_lab.train import data, devices, loop

    images = data.load(settings.data, settings.data_dir)
    device = devices.of_worker(settings.device, local_rank)
    trainer = loop.Trainer(settings, images, rank, interface, device)
    if not settings.is_server(rank):
        on_event({"event": "ready", **trainer.measure_speed()})
    return trainer


def run_all(trainer: Trainer, runs: list[Run], on_event: OnEvent) -> Iterator[list[RankRecord]]:
    """Runs rank 0's `runs` one after the other in the process group, and destroys it. The records
    are those of the ranks in this process."""
    import torch.distributed as dist

    for run in [Run(**run) for run in messages.broadcast([asdict(run) for run in runs])]:
        on_event({"event": "begin", "run": trainer.settings.title(run)})
        yield trainer.run(run, on_event)
    gc.collect()  # models that are part of a cycle would keep the group
    # This ends the threads of the group, which must not outlive the interpreter.
    dist.destroy_process_group()


# Under torchrun


def world_of_torchrun() -> tuple[int, int] | None:
    """Rank and number of ranks; None if torchrun did not start this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run_under_torchrun(
    settings: TrainSettings, runs: list[Run], rank: int, on_event: OnEvent
) -> None:
    """Trains in torchrun's ranks, whose number must be that of the settings. Rank 0 decides about
    the runs, and gets events with the records of all ranks. Raises TrainError."""
    import torch.distributed as dist

    trainer = prepare(settings, rank, int(os.environ.get("LOCAL_RANK", rank)), None, on_event)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    for (record,) in run_all(trainer, runs, on_event):
        records = [RankRecord.read(each) for each in messages.gather(asdict(record))]
        if rank == 0:
            on_event({"event": "records", "records": records})


# Started by the launcher


def _listen(launcher: Connection, lost: set[int]) -> None:
    """Notes workers that are gone, and ends with the pipe."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            lost.add(messages.receive(launcher)["lost"])
    os._exit(1)


def _end_with_parent() -> None:
    """Lets the kernel kill this process when the launcher dies, even if this process hangs. If the
    system has no such call, only the end of the pipe ends this process."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _connect(store: dist.FileStore, rank: int, ranks: int) -> None:  # type: ignore[name-defined]
    """Makes the process group, and checks that its connections lead to the launcher's workers: no
    other user can write into the store, but connect with the ports."""
    import torch.distributed as dist

    from gradwire.torch.network.meeting import Meeting

    def make(_: dist.Store) -> dist.ProcessGroup:  # type: ignore[name-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_PATIENCE)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    Meeting(store, rank, ranks).make_group(make, _PATIENCE.total_seconds())


def main() -> int:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    launcher = Connection(sys.stdin.fileno())

    import torch.distributed as dist

    told = messages.receive(launcher)
    settings, rank = TrainSettings.read(told["settings"]), told["rank"]
    runs = [Run(**run) for run in told["runs"]]
    tell = partial(messages.send, launcher)
    try:
        trainer = prepare(settings, rank, rank, told["interface"], tell)
        threading.Thread(target=_listen, args=(launcher, trainer.lost), daemon=True).start()
        trainer.store = dist.FileStore(told["store"], settings.processes)  # type: ignore[attr-defined]
        _connect(trainer.store, rank, settings.processes)
        for records in run_all(trainer, runs, tell):
            tell({"event": "records", "records": [asdict(record) for record in records]})
    except TrainError as error:
        tell({"event": "error", "error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
