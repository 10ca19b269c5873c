"""Pages of the C and C++ headers: their comments as text, their declarations as code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from make_man import read_blocks

IN_C = {
    "gradwire.h": "The C API",
    "gradwire_mpi.h": "The C API over MPI",
}
_NAMED = re.compile(
    r"(?:^|\n)(?:GW_\w+ |GRADWIRE_\w+ |inline |constexpr |\[\[nodiscard\]\] )*"
    r"(?:(?:typedef )?(?:enum class|class|struct|using|concept)\s+(?:GRADWIRE_EXPORT )?(\w+)"
    r"|[\w:<>,*& ]*?[\s*&](\w+)\()"
)
_PRIVATE = re.compile(r"\n private:\n.*?\n\};", re.DOTALL)
_LEFT_OUT = re.compile(r"^(?:#|namespace [\w:]+ \{|\}  // namespace|class \w+;|extern )")


def pages(folder: Path) -> dict[str, str]:
    """File name and text of each page."""
    found = {"c.md": "gradwire.h", "c_mpi.md": "gradwire_mpi.h"}
    in_c = {page: _c_page(folder / header) for page, header in found.items()}
    headers = [path for path in sorted(folder.glob("*.h")) if path.name not in IN_C]
    return in_c | {"cpp.md": "\n".join(["# The C++ API\n", *map(_cpp_section, headers)])}


def _c_page(path: Path) -> str:
    parts = [f"# {IN_C[path.name]}\n", f"`#include <gradwire/{path.name}>`\n"]
    for kind, text in read_blocks(path.read_text(encoding="utf-8")):
        if kind == "section":
            parts.append(f"## {text.capitalize()}\n")
        elif kind == "comment":
            lines = [re.sub(r"^ ?\* ?", "", line) for line in text[2:-2].split("\n")]
            if not text.startswith("/*\n"):
                lines = [re.sub(r"^ {3}", "", line) for line in lines]
            parts.append(_as_text(lines))
        elif "#include" not in text:
            parts += [f"{title}\n" for title in [_title(text)] if title]
            parts.append(f"```c\n{text}\n```\n")
    return "\n".join(parts)


def _cpp_section(path: Path) -> str:
    parts = [f"## gradwire/{path.name}\n"]
    for comment, code in _cpp_blocks(path.read_text(encoding="utf-8")):
        if code:
            parts += [f"{title}\n" for title in [_title(code)] if title]
        if comment:
            parts.append(_as_text(comment))
        if code:
            parts.append(f"```cpp\n{code}\n```\n")
    return "\n".join(parts)


def _cpp_blocks(text: str) -> Iterator[tuple[list[str], str]]:
    """The lines of each comment at the outermost level, and the declarations below it."""
    for block in re.split(r"\n\s*\n(?=\S)", text):
        lines = block.strip("\n").split("\n")
        count = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
        comment = [line[2:].removeprefix(" ") for line in lines[:count]]
        code = [line for line in lines[count:] if not _LEFT_OUT.match(line)]
        if comment or any(line.strip() for line in code):
            yield comment, _PRIVATE.sub("\n};", "\n".join(code).strip("\n"))


def _title(code: str) -> str:
    """A heading with the first name that the code declares; empty: it declares none."""
    named = _NAMED.search(code)
    return f"### {named.group(1) or named.group(2)}" if named else ""


def _as_text(lines: list[str]) -> str:
    """Paragraphs in Markdown; indented lines stay as they are."""
    text = "\n".join(line.rstrip() for line in lines).strip("\n")
    parts = []
    for indented, part in _runs(text.split("\n")):
        if indented:
            parts.append("```text\n" + "\n".join(part) + "\n```\n")
        else:
            parts.append("\n".join(_escape(line) for line in part) + "\n")
    return "\n".join(parts)


def _runs(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Lines that are indented or not, in runs."""
    run: list[str] = []
    for line in lines:
        indented = line.startswith("  ")
        if run and line and indented != run[0].startswith("  "):
            yield run[0].startswith("  "), run
            run = []
        if run or line:
            run.append(line)
    if run:
        yield run[0].startswith("  "), run


def _escape(line: str) -> str:
    return re.sub(r"([*_\[\]<|#])", r"\\\1", line)
