#!/usr/bin/env python3
"""Compares the exports of gradwire's shared libraries with the declarations of the public headers.

In C, the libraries export exactly the functions that are marked GW_API. In C++, they export exactly
the names of namespace gradwire that are marked GRADWIRE_EXPORT; every function at namespace scope
has the mark, unless it is defined in the header. All these symbols have the version GRADWIRE_x.y.
Symbols with the version GRADWIRE_PRIVATE_x.y.z are for the libgradwire_cuda.so of the same build.

Usage: check_exports.py INCLUDE_DIR LIBRARY...    exit status 0: equal, 1: differences printed
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_C_FUNCTION = re.compile(r"^GW_API\b[^;]*?\b(gw_\w+)\(", re.MULTILINE)
_CPP_CLASS = re.compile(r"^(?:class|struct) GRADWIRE_EXPORT (\w+)", re.MULTILINE)
# A declaration starts in the first column and ends with ; before any brace but {}.
_CPP_DECLARATION = re.compile(
    r"^(?=[A-Za-z\[])(?!using|template|class|struct|enum)(?:[^;{}]|\{\})*;", re.MULTILINE
)
_FUNCTION_NAME = re.compile(r"(\w+)\(")
_PRIVATE_VERSION = re.compile(r"GRADWIRE_PRIVATE_\d+\.\d+\.\d+")
_SPECIAL = re.compile(r"^(?:typeinfo name|typeinfo|vtable|VTT) for ")


@dataclass
class Declared:
    """The names that the headers declare."""

    c_functions: set[str] = field(default_factory=set)
    cpp_names: set[str] = field(default_factory=set)
    unmarked: list[str] = field(default_factory=list)


def read_headers(include: Path) -> Declared:
    """What the headers under ``include``/gradwire declare."""
    declared = Declared()
    for path in sorted((include / "gradwire").rglob("*.h")):
        text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        declared.c_functions |= set(_C_FUNCTION.findall(text))
        if "namespace gradwire" not in text:
            continue
        declared.cpp_names |= set(_CPP_CLASS.findall(text))
        for match in _CPP_DECLARATION.finditer(text):
            declaration = match.group().replace("[[nodiscard]]", "").strip()
            name = _FUNCTION_NAME.search(declaration)
            if name is None or "=" in declaration[: name.start()]:
                continue
            if declaration.startswith("GRADWIRE_EXPORT"):
                declared.cpp_names.add(name.group(1))
            else:
                declared.unmarked.append(f"{path.name}: {name.group(1)}")
    return declared


def read_exports(library: Path) -> list[tuple[str, str]]:
    """(demangled name, version) of each symbol that the library exports publicly."""
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--demangle", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exports = []
    for line in listed.splitlines():
        _, kind, name = line.split(maxsplit=2)
        symbol, _, version = name.partition("@@")
        # Type A is the version itself.
        if kind != "A" and not _PRIVATE_VERSION.fullmatch(version):
            exports.append((symbol, version))
    return exports


def compare(declared: Declared, exports: list[tuple[str, str]]) -> list[str]:
    """One line for each difference."""
    faults = [f"declared without GRADWIRE_EXPORT: {name}" for name in declared.unmarked]
    found_c: set[str] = set()
    found_cpp: set[str] = set()
    for symbol, version in exports:
        if not re.fullmatch(r"GRADWIRE_\d+\.\d+", version):
            faults.append(f"exported without a version: {symbol}")
        qualified = re.match(r"gradwire(?:::~?\w+)+", _SPECIAL.sub("", symbol))
        names = set(qualified.group().split("::")) if qualified else set()
        if names & declared.cpp_names:
            found_cpp |= names & declared.cpp_names
        elif symbol in declared.c_functions:
            found_c.add(symbol)
        else:
            faults.append(f"exported, but not public: {symbol}")
    missing = (declared.c_functions - found_c) | (declared.cpp_names - found_cpp)
    faults += [f"declared, but not exported: {name}" for name in sorted(missing)]
    return faults


def main(arguments: list[str]) -> int:
    """Command line entry point; returns the exit status."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    declared = read_headers(Path(arguments[0]))
    exports = [export for library in arguments[1:] for export in read_exports(Path(library))]
    faults = compare(declared, exports)
    for fault in faults:
        print(fault)
    print(
        f"check_exports: {len(exports)} symbols; declared: {len(declared.c_functions)} functions "
        f"of C, {len(declared.cpp_names)} names of C++; {len(faults)} faults"
    )
    return 1 if faults or not exports else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
