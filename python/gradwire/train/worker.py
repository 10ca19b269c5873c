"""A rank's process: `python -m gradwire.train.worker`, started by the launcher, or torchrun's.

A launched worker and its launcher exchange JSON objects, one a line, over pipes, and so never over
the network that is measured:

    launcher -> stdin    {"settings", "rank", "address", "interface"}   the network is there: go
    worker -> stdout     {"event": "ready", "parameters", "step_seconds", "evaluation_seconds"}
    rank 0 -> stdout     {"event": "store", "port"}                     where the others meet it
    launcher -> stdin    {"port"}                                       to the others
    worker -> stdout     {"event": "begin", "codec"}
    worker -> stdout     {"event": "step", "codec", "step", "seconds", "loss"[, "accuracy"]}
    worker -> stdout     {"event": "record", "record": RankRecord}      a codec is done
    worker -> stdout     {"event": "error" or "diverged", "message"}    and exit status 1

The end of stdin means that the launcher is gone: the worker ends at once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

from gradwire.train.errors import DivergedError, TrainError
from gradwire.train.settings import TrainSettings

if TYPE_CHECKING:
    from gradwire.train.loop import OnEvent, Trainer
    from gradwire.train.records import RankRecord

# Rank 0 may evaluate for long on a slow machine while the others wait in a barrier. A worker that
# ended is noticed by its closed connections and by the launcher, not by this limit.
_PATIENCE = timedelta(hours=2)

_PR_SET_PDEATHSIG = 1


def prepare(
    settings: TrainSettings, rank: int, local_rank: int, interface: str | None, on_event: OnEvent
) -> Trainer:
    """Loads the data, and measures a worker's speed while there is no process group."""
    from gradwire.train import data, devices, loop

    images = data.load(settings.data, settings.data_dir)
    device = devices.of_worker(settings.device, local_rank)
    trainer = loop.Trainer(settings, images, rank, interface, device)
    if not settings.is_server(rank):
        on_event({"event": "ready", **trainer.measure_speed()})
    return trainer


def run_codecs(trainer: Trainer, on_event: OnEvent, **group: Any) -> Iterator[RankRecord]:
    """Runs all codecs one after the other in a Gloo process group, which `group` describes."""
    import torch.distributed as dist

    import gradwire.torch  # noqa: F401 - before there is a group, see there

    dist.init_process_group("gloo", timeout=_PATIENCE, **group)
    for codec in trainer.settings.codecs:
        on_event({"event": "begin", "codec": codec})
        yield trainer.run(codec, on_event)
    gc.collect()  # models that are part of a cycle would keep the group
    # This ends the threads of the group, which must not meet the end of the interpreter.
    dist.destroy_process_group()


# Under torchrun


def is_under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return "RANK" in environment and "WORLD_SIZE" in environment


def world_of_torchrun() -> tuple[int, int]:
    """Rank and number of ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run_under_torchrun(settings: TrainSettings, on_event: OnEvent) -> list[list[RankRecord]] | None:
    """Runs all codecs in the ranks that torchrun started, as many as the settings have. Returns the
    records of all ranks for each codec on rank 0, None on the others. Raises TrainError."""
    import torch.distributed as dist

    rank, world = world_of_torchrun()
    trainer = prepare(settings, rank, int(os.environ.get("LOCAL_RANK", rank)), None, on_event)
    gathered = []
    for record in run_codecs(trainer, on_event):
        everyone: list[Any] = [None] * world
        dist.gather_object(record, everyone if rank == 0 else None)
        gathered.append(everyone)
    return gathered if rank == 0 else None


# Started by the launcher


class Launcher:
    """The launcher as a worker sees it."""

    def __init__(self) -> None:
        # What libraries print goes to stderr; only events go to the launcher's pipe.
        self._events: IO[str] = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, event: dict[str, Any]) -> None:
        self._events.write(json.dumps(event) + "\n")

    def receive(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self._lines.get())
        return values

    def _read(self) -> None:
        # Unbuffered: a thread in a buffered read holds a lock that the end of Python may need.
        with open(0, "rb", buffering=0, closefd=False) as orders:
            for line in orders:
                self._lines.put(line.decode())
        os._exit(1)


def _end_with_parent() -> None:
    """Lets the kernel kill this process when the launcher's dies, even if this one hangs. Where the
    system has no such call, the end of stdin alone ends this process."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    launcher = Launcher()

    import torch.distributed as dist

    orders = launcher.receive()
    settings, rank = TrainSettings.from_json(orders["settings"]), int(orders["rank"])
    try:
        trainer = prepare(settings, rank, rank, orders["interface"], launcher.send)
        port = 0 if rank == 0 else launcher.receive()["port"]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            orders["address"], port, settings.ranks, rank == 0, wait_for_workers=False
        )
        if rank == 0:
            launcher.send({"event": "store", "port": store.port})
        group = {"store": store, "rank": rank, "world_size": settings.ranks}
        for record in run_codecs(trainer, launcher.send, **group):
            launcher.send({"event": "record", "record": record.to_json()})
    except TrainError as error:
        kind = "diverged" if isinstance(error, DivergedError) else "error"
        launcher.send({"event": kind, "message": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
