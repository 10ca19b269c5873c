#!/usr/bin/env python3
"""Checks that shared libraries have what GRADWIRE_HARDENED gives: addresses of functions that
can't be overwritten (RELRO, all bound at the start), a stack that holds no code, stack protectors,
and the checks of libstdc++ and libc.

Usage: scripts/check_hardening.py LIBRARY..."""

import re
import subprocess
import sys


def readelf(option: str, library: str) -> str:
    done = subprocess.run(
        ["readelf", "--wide", option, library], check=True, capture_output=True, text=True
    )
    return done.stdout


def missing(library: str) -> list[str]:
    """What the library lacks."""
    segments, dynamic = readelf("--program-headers", library), readelf("--dynamic", library)
    symbols = readelf("--dyn-syms", library)
    stack = [line.split() for line in segments.splitlines() if "GNU_STACK" in line]
    found = {
        "RELRO": "GNU_RELRO" in segments,
        "binding at the start (-z now)": re.search(r"BIND_NOW|FLAGS_1.*\bNOW\b", dynamic),
        "a stack without code": bool(stack) and all("E" not in line[-2] for line in stack),
        "stack protectors": "__stack_chk_fail" in symbols,
        "checks of libstdc++": "glibcxx_assert" in symbols,
        "checks of libc": re.search(r"__(?!stack)\w+_chk\b", symbols),
    }
    return [name for name, there in found.items() if not there]


def main() -> None:
    """Command line entry point."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    lacks = {library: missing(library) for library in sys.argv[1:]}
    for library, names in lacks.items():
        print(f"{library}: {'ok' if not names else 'lacks ' + ', '.join(names)}")
    sys.exit(any(lacks.values()))


if __name__ == "__main__":
    main()
