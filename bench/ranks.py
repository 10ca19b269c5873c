"""The ranks of a measurement: processes of the calling script, behind rate-limited links."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from gradwire_lab.train import network

_PORT = 29500
_ADDRESS, _INTERFACE = "127.0.0.1", "lo"


def run_ranks(
    arguments: Callable[[int], Sequence[str]],
    ranks: int,
    rate: int | None,
    per_machine: int = 1,
    latency: float = 0.0,
    python: str = sys.executable,
    most_seconds: float | None = None,
) -> None:
    """Runs `python SCRIPT *arguments(rank)` for each rank, to its end; each calls `join` first.

    rate: bits a second of the links, each way; None: the ranks use the loopback. per_machine: so
    many consecutive ranks share a link, and a network namespace. latency: seconds that a packet
    travels from link to link. most_seconds: how long the ranks may take. Raises SystemExit if a
    rank fails, or takes longer.
    """
    shaped = rate is not None
    environment = os.environ | {
        "MASTER_ADDR": network.address(0) if shaped else _ADDRESS,
        "MASTER_PORT": str(_PORT if shaped else _free_port()),
        "GLOO_SOCKET_IFNAME": network.INTERFACE if shaped else _INTERFACE,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as cleanup:
        for rank in range(ranks):
            command = [python, sys.argv[0], *arguments(rank)]
            inherited: tuple[int, ...] = ()
            if shaped and rank % per_machine:
                first = processes[rank - rank % per_machine]
                inherited = (cleanup.enter_context(network.namespace_of(first)),)
                command = network.in_namespace(inherited[0], command)
            elif shaped:
                command = network.in_own_namespace(command)
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
            cleanup.callback(_kill_with_children, process)
            processes.append(process)
        if rate is not None:
            attach = cleanup.enter_context(network.shaped_network(rate, latency))
            for rank in range(0, ranks, per_machine):
                attach(rank, processes[rank])
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()  # go
        until = None if most_seconds is None else time.monotonic() + most_seconds
        try:
            codes = [
                process.wait(until and max(0.0, until - time.monotonic())) for process in processes
            ]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the ranks took more than {most_seconds:g} s") from None
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def _kill_with_children(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    """Of the loopback, which other measurements may use at the same time."""
    with socket.create_server((_ADDRESS, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def join(rank: int, world_size: int) -> None:
    """Waits until the network is ready, and makes the default group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.stdin.read()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
