"""``gradwire info``."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from gradwire.cli.output import (
    JsonOption,
    describe_compilation,
    human_bytes,
    print_json,
    print_pairs,
)
from gradwire.machine import describe_build, describe_machine

# The use of each optional package.
_PACKAGES = {
    "numpy": "arrays",
    "torch": "gradwire.torch",
    "gradwire-lab": "`gradwire train`, plan, simulate, evaluate, report, bench",
}


def info(as_json: JsonOption = False) -> None:
    """Show version, SIMD targets, CPU and what was found installed."""
    report: dict[str, Any] = {
        "build": describe_build(),
        "machine": describe_machine(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    if as_json:
        print_json(report)
        return
    build, machine = report["build"], report["machine"]
    print_pairs(
        [
            ("gradwire", f"{build['version']}, commit {build['commit']}"),
            ("built with", describe_compilation(build)),
            ("SIMD targets", f"{', '.join(build['simd_targets'])} (best first)"),
            ("GPU codecs", "built" if build["cuda"] else "not built (GRADWIRE_CUDA=ON does)"),
            ("CPU", machine["cpu"]),
            ("cores", f"{machine['cores']} may be used"),
            ("caches", ", ".join(f"{name} {size}" for name, size in machine["caches"].items())),
            ("memory", human_bytes(machine["memory_bytes"])),
            ("system", f"{machine['system']}, Python {machine['python']}"),
            *(
                (name, f"{version or 'not installed'} ({_PACKAGES[name]})")
                for name, version in report["packages"].items()
            ),
        ]
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
