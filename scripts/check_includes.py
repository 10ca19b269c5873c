#!/usr/bin/env python3
"""Checks all #include lines: each layer may include only the layers before it.

A folder of C++ may include only itself and the folders before it in this list:

    include/gradwire  base  stages  codecs  delta  frame  feedback  choice  exchange  capi  engines
    cuda

(all but the first are in src/). The folders of src/stages must not include each other in a circle.
python/src, tests, bench, fuzz and examples may include everything, and nothing may include them. If
an include cannot be followed, it must not hide an error. A bare name that some include directory
could resolve counts for every file that it could mean; an include through a macro is an error.
import-linter checks the packages of Python (scripts/lint.sh imports).

Usage: check_includes.py [ROOT]     exit status 0: clean, 1: offending lines printed, 2: bad usage
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LAYERS = (
    "include",
    "base",
    "stages",
    "codecs",
    "delta",
    "frame",
    "feedback",
    "choice",
    "exchange",
    "capi",
    "engines",
    "cuda",
)
OUTSIDE = ("python", "tests", "bench", "fuzz", "examples")
SUFFIXES = {".h", ".hpp", ".inl", ".inc", ".def", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh"}

# Numbers with digit separators, raw strings and strings may hold quotes or comment signs. Each is
# consumed whole, so that what remains as a comment is one.
_TOKEN = re.compile(
    r"""//[^\n]*
    | /\*.*?\*/
    | (?<!\w)\d(?:'?[\w.])*
    | R"(?P<mark>[^\s()\\]*)\(.*?\)(?P=mark)"
    | "(?:\\.|[^"\\\n])*"
    | '(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.VERBOSE,
)
# HWY_TARGET_INCLUDE is how Highway includes a file once for each SIMD target.
_INCLUDE = re.compile(
    r"^[ \t]*#[ \t]*(?:include(?:_next)?|import|define[ \t]+HWY_TARGET_INCLUDE)\b(.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Offence:
    """One include line that breaks the order."""

    file: PurePosixPath
    line: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}\n    {self.why}"


def layer_of(path: PurePosixPath) -> str | None:
    """The layer of a file given by its path from the root; None if it is in no known folder."""
    top = path.parts[0]
    if top == "include" or top in OUTSIDE:
        return top
    if top == "src" and len(path.parts) > 2 and path.parts[1] in LAYERS[1:]:
        return path.parts[1]
    return None


def may_include(layer: str, target: str) -> bool:
    """Whether `layer` may include `target`: it is the same layer or an earlier one."""
    if layer in OUTSIDE:
        return True
    return target in LAYERS and LAYERS.index(target) <= LAYERS.index(layer)


def stage_of(path: PurePosixPath) -> str | None:
    """The stage of a file in a folder of src/stages; None for any other file."""
    return path.parts[2] if path.parts[:2] == ("src", "stages") and len(path.parts) > 3 else None


def find_circles(arrows: dict[tuple[str, str], Offence]) -> list[Offence]:
    """The includes between stages that are part of a circle, each with its line."""
    reached = {start: {start} for arrow in arrows for start in arrow}
    for _ in reached:
        for start, end in arrows:
            reached[start] |= reached[end]
    return [arrows[start, end] for start, end in arrows if start in reached[end]]


def find_includes(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, argument) of each include directive that is not commented out."""

    def join(match: re.Match[str]) -> str:
        # The compiler joins a spliced line, so its line breaks move after it.
        return match.group().replace("\\\n", "") + "\n" * match.group().count("\\\n")

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        # A string stays, because it may be the argument. Comments and raw strings keep their line
        # breaks.
        return re.sub(r"[^\n]", " ", found) if found[0] in "/R" else found

    text = re.sub(r"(?:[^\n]*\\\n)+[^\n]*", join, text)
    text = _TOKEN.sub(blank, text)
    for match in _INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group(1).strip()


def possible_targets(
    argument: str, file: PurePosixPath, ours: frozenset[PurePosixPath]
) -> list[PurePosixPath] | None:
    """Our files that an include may mean: [] if it is not ours, None if that is unknown."""
    match = re.fullmatch(r'"([^"]+)"|<([^>]+)>', argument)
    if not match:
        return None
    name = match.group(1) or match.group(2)
    quoted = match.group(1) is not None
    roots = [PurePosixPath("include"), PurePosixPath("src")]
    if quoted:
        roots.insert(0, file.parent)
    for root in roots:
        candidate = _normalise(root / name)
        if candidate in ours:
            return [candidate]
    if not quoted:
        return []
    # Our include directories do not find it, but another -I could.
    tail = tuple(part for part in PurePosixPath(name).parts if part not in ("..", "."))
    return sorted(path for path in ours if path.parts[-len(tail) :] == tail)


def _normalise(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return PurePosixPath(*parts)


def check_includes(root: Path) -> tuple[list[Offence], int]:
    """Checks every C and C++ file under `root`; returns the offences and the number of files."""
    files = sorted(
        PurePosixPath(path.relative_to(root).as_posix())
        for top in ("include", "src", *OUTSIDE)
        for path in (root / top).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
    ours = frozenset(files)
    offences: list[Offence] = []
    arrows: dict[tuple[str, str], Offence] = {}
    for file in files:
        layer = layer_of(file)
        if layer is None:
            known = ", ".join(LAYERS[1:])
            offences.append(Offence(file, 1, "in no layer", f"folders of src/ are: {known}"))
            continue
        for line, argument in find_includes((root / file).read_text(encoding="utf-8")):
            what = f"#include {argument}"
            targets = possible_targets(argument, file, ours)
            if targets is None:
                offences.append(Offence(file, line, what, "cannot be followed; name the file"))
                continue
            for target in targets:
                stage, target_stage = stage_of(file), stage_of(target)
                if stage and target_stage and stage != target_stage:
                    why = f"{stage} and {target_stage} are in a circle"
                    arrows.setdefault((stage, target_stage), Offence(file, line, what, why))
                target_layer = layer_of(target)
                if target_layer is None or may_include(layer, target_layer):
                    continue
                why = f"{layer} may not include {target_layer} ({target})"
                offences.append(Offence(file, line, what, why))
    return offences + find_circles(arrows), len(files)


def main(arguments: list[str]) -> int:
    """Command line entry point; returns the exit status."""
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print(__doc__)
        return 2
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    offences, count = check_includes(root)
    if count == 0:
        print(f"check_includes: no source files under {root}")
        return 1
    for offence in offences:
        print(offence)
    verdict = f"{len(offences)} offending lines" if offences else "the arrows point one way"
    print(f"check_includes: {count} files, {verdict}")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
