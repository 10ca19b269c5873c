"""Programs that are started as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_program(
    program: Path, ranks: int = 0, seconds: float = 240.0, arguments: Sequence[str] = ()
) -> tuple[str, str]:
    """Runs it under torchrun with so many ranks (0: by itself). Returns stdout and stderr; an exit
    code but 0 fails the test."""
    command = [sys.executable]
    if ranks > 0:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=0"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    result = subprocess.run(
        [*command, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | _ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr
