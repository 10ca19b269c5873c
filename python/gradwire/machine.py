"""Describes this machine and this build, for reports of measurements."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gradwire
from gradwire import _core


def describe_machine() -> dict[str, Any]:
    """CPU model, cores this process may use, caches of core 0, memory in bytes, system."""
    return {
        "cpu": _cpu_model(),
        "cores": _count_cores(),
        "caches": _caches(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def load_average() -> float | None:
    """How many threads ran or waited for a core, the mean of the last minute; None: the system does
    not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def describe_build() -> dict[str, Any]:
    """Version, commit, compiler and flags of the compiled module, whether it has kernels for GPUs,
    and the SIMD targets of this CPU (best first)."""
    return {
        "version": gradwire.__version__,
        **_core.build_info(),
        "cuda": find_spec("gradwire._cuda") is not None,
        "simd_targets": gradwire.simd_targets(),
    }


def find_checkout() -> Path | None:
    """The root of the gradwire source tree around this package or the working directory."""
    for folder in (Path(__file__).resolve(), Path.cwd() / "_"):
        for parent in folder.parents:
            if (parent / "src" / "codecs" / "codecs.def").is_file():
                return parent
    return None


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS binds no process to cores


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    """{"L1d": "32K", "L2": "1024K"}; empty where the system does not say."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError):
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
            if kind != "Instruction":
                found[f"L{level}{'d' if kind == 'Data' and level == '1' else ''}"] = size
    return found
