"""A rank's process: `python -m gradwire.train.worker`, started by the launcher, or torchrun's.

What a launched worker and its launcher say to each other, one JSON object a line, over pipes and so
never over the network that is measured:

    launcher -> stdin    {"settings", "rank", "address", "interface"}   go: your network is there
    worker -> stdout     {"event": "ready", "parameters", "step_seconds", "evaluation_seconds"}
    rank 0 -> stdout     {"event": "store", "port"}                     where the others meet it
    launcher -> stdin    {"port"}                                       to the others
    worker -> stdout     {"event": "begin", "codec"}
    worker -> stdout     {"event": "step", "codec", "step", "seconds", "loss"[, "accuracy"]}
    worker -> stdout     {"event": "record", "record": RankRecord}      a codec is done
    worker -> stdout     {"event": "error", "message"}                  and exit status 1

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

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from gradwire.train.loop import OnEvent, Trainer
    from gradwire.train.records import RankRecord
    from gradwire.train.settings import TrainSettings

# Rank 0 may evaluate for long on a slow machine while the others wait in a barrier. A worker that
# is gone is noticed by its closed connections and by the launcher, not by this.
_PATIENCE = timedelta(hours=2)

_PR_SET_PDEATHSIG = 1


def run_codecs(
    settings: TrainSettings, trainer: Trainer, on_event: OnEvent
) -> Iterator[RankRecord]:
    """One run after the other, in an initialised process group."""
    for codec in settings.codecs:
        on_event({"event": "begin", "codec": codec})
        yield trainer.run(codec, on_event)


def join(store: Store, rank: int, world: int) -> None:
    """Initialises the process group (Gloo)."""
    import torch.distributed as dist

    import gradwire.torch  # noqa: F401 - before there is a group, see there

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_PATIENCE)


def leave() -> None:
    """Ends the process group with its threads: none may meet the end of the interpreter."""
    import torch.distributed as dist

    gc.collect()  # models that are part of a cycle would keep the group
    dist.destroy_process_group()


# Under torchrun


def is_under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return "RANK" in environment and "WORLD_SIZE" in environment


def world_of_torchrun() -> tuple[int, int]:
    """Rank and number of ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run_under_torchrun(settings: TrainSettings, on_event: OnEvent) -> list[list[RankRecord]] | None:
    """Runs all codecs in the ranks that torchrun started, as many as the settings have. On rank 0
    the records of all ranks for each codec, None on the others. Raises DataError, DivergedError."""
    import torch.distributed as dist

    from gradwire.train import data, devices, loop

    rank, world = world_of_torchrun()
    images = data.load(settings.data, settings.data_dir)
    device = devices.of_worker(settings.device, int(os.environ.get("LOCAL_RANK", rank)))
    trainer = loop.Trainer(settings, images, rank, None, device)
    if not settings.is_server(rank):
        on_event({"event": "ready", "rank": rank, **trainer.measure_speed()})
    import gradwire.torch  # noqa: F401 - before there is a group, see there

    dist.init_process_group("gloo", timeout=_PATIENCE)
    gathered = []
    for record in run_codecs(settings, trainer, on_event):
        everyone: list[Any] = [None] * world
        dist.gather_object(record, everyone if rank == 0 else None)
        gathered.append(everyone)
    leave()
    return gathered if rank == 0 else None


# Started by the launcher


class Launcher:
    """The launcher as a worker sees it."""

    def __init__(self) -> None:
        # Whatever libraries print goes to stderr; only events go to the launcher's pipe.
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
    """Lets the kernel kill this process when the launcher's dies, even by SIGKILL, and even if
    this one hangs. Where there is no such call, the end of stdin is what remains."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    launcher = Launcher()

    import torch.distributed as dist

    from gradwire.train import data, devices, loop
    from gradwire.train.settings import TrainSettings

    orders = launcher.receive()
    settings, rank = TrainSettings.from_json(orders["settings"]), int(orders["rank"])
    try:
        images = data.load(settings.data, settings.data_dir)
        device = devices.of_worker(settings.device, rank)
        trainer = loop.Trainer(settings, images, rank, orders["interface"], device)
        if not settings.is_server(rank):
            launcher.send({"event": "ready", **trainer.measure_speed()})
        port = 0 if rank == 0 else launcher.receive()["port"]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            orders["address"], port, settings.ranks, rank == 0, wait_for_workers=False
        )
        if rank == 0:
            launcher.send({"event": "store", "port": store.port})
        join(store, rank, settings.ranks)
        for record in run_codecs(settings, trainer, launcher.send):
            launcher.send({"event": "record", "record": record.to_json()})
        leave()
    except (data.DataError, loop.DivergedError) as error:
        launcher.send({"event": "error", "message": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
