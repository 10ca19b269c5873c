#!/usr/bin/env python3
"""Makes the manual pages in man/: section 1 from the commands, section 3 from the C headers.

The pages are kept in the repository, so that an installation need not make them; a test checks that
they are current.

Usage: make_man.py [--check]     --check: change nothing; exit status 1 where a page is not current
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import get_args, get_origin

from gradwire.cli.app import (
    LAB_COMMANDS,
    LIBRARY_COMMANDS,
    function_of,
    gradwire,
    make_command,
)

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "gradwire" / "gradwire.h"
MPI_HEADER = HEADER.with_name("gradwire_mpi.h")
MAN = ROOT / "man"
LAB_MAN = ROOT / "lab" / "data" / "share" / "man" / "man1"  # flit installs data/

EXIT_STATUS = (
    "0: done. 1: it could not be done, and one line on standard error says why. 2: the command "
    "line is wrong. 130: interrupted."
)


def escape(text: str) -> str:
    """Escapes text so that roff prints it unchanged."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return "\n".join(
        "\\&" + line if line.startswith((".", "'")) else line for line in text.split("\n")
    )


def title(name: str, section: int, source: str = "the command") -> str:
    """The first line of a page. It has no date, so that the same sources give the same page."""
    numbers = re.findall(r"#define GW_VERSION_\w+ (\d+)", HEADER.read_text(encoding="utf-8"))
    comment = f'.\\" Made by scripts/make_man.py from {source}.'
    return f'{comment}\n.TH {name.upper()} {section} "" "gradwire {".".join(numbers)}" "gradwire"'


# ---- section 1 ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CliParameter:
    """A parameter of a command."""

    options: list[str]  # "--codec", "-c"; none: an argument
    value: str  # the name of its value; "": a flag
    repeatable: bool
    text: str

    @property
    def tag(self) -> str:
        """`--codec TEXT`, as roff."""
        names = ", ".join(f"\\fB{escape(option)}\\fR" for option in self.options)
        return f"{names} \\fI{escape(self.value)}\\fR".strip() if self.value else names

    @property
    def paragraph(self) -> str:
        """The tagged paragraph that describes it."""
        return f".TP\n{self.tag}\n{escape(self.text)}"


def read_parameters(name: str, function: Callable[..., object]) -> Iterator[CliParameter]:
    """The parameters of a command, as Typer derives them from its function."""
    command = make_command(name)
    annotations = {
        parameter.name: get_args(parameter.annotation)[0]
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if get_args(parameter.annotation)  # typer.Context is no option
    }
    type_names = {int: "INTEGER", float: "NUMBER", Path: "PATH"}
    for parameter in command.params:
        if parameter.name not in annotations:
            continue
        annotation = annotations[parameter.name]
        if isinstance(annotation, UnionType):
            annotation = next(a for a in get_args(annotation) if a is not NoneType)
        repeatable = get_origin(annotation) is list
        if repeatable:
            (annotation,) = get_args(annotation)
        is_option = parameter.opts[0].startswith("-")
        is_flag = is_option and parameter.is_flag
        fallback = type_names.get(annotation, "TEXT") if is_option else parameter.name.upper()
        text = re.sub(r"\[/?[a-z]+\]", "", parameter.help or "").strip()
        default = parameter.default
        if parameter.show_default and not isinstance(default, bool) and default not in (None, ""):
            text += f"{'' if text.endswith('.') else '.'} Default: {default}."
        yield CliParameter(
            options=[*parameter.opts, *parameter.secondary_opts] if is_option else [],
            value="" if is_flag else parameter.metavar or fallback,
            repeatable=repeatable,
            text=text,
        )


def command_page(name: str) -> str:
    """The page of one subcommand."""
    function = function_of(name)
    parameters = list(read_parameters(name, function))
    arguments = [parameter for parameter in parameters if not parameter.options]
    options = [parameter for parameter in parameters if parameter.options]
    synopsis = f"\\fBgradwire {name}\\fR [\\fIoptions\\fR]"
    for argument in arguments:
        synopsis += f" {argument.tag}" + (" ..." if argument.repeatable else "")
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    lines = [
        title(f"gradwire-{name}", 1),
        ".SH NAME",
        f"gradwire\\-{name} \\- {escape(lower_first(summary(function)))}",
        ".SH SYNOPSIS",
        synopsis,
        ".SH DESCRIPTION",
        "\n.PP\n".join(escape(paragraph) for paragraph in paragraphs),
    ]
    if arguments:
        lines += [".SH ARGUMENTS", *(argument.paragraph for argument in arguments)]
    lines += [".SH OPTIONS", *(option.paragraph for option in options)]
    lines += [".TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nPrint the options."]
    lines += [".SH EXIT STATUS", escape(EXIT_STATUS), ".SH SEE ALSO", ".BR gradwire (1)"]
    return "\n".join(lines) + "\n"


def summary(function: Callable[..., object]) -> str:
    """The first line of a command's description."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def lower_first(sentence: str) -> str:
    """A sentence in the form of the section NAME."""
    return sentence[0].lower() + sentence[1:].rstrip(".")


def command_line(name: str) -> str:
    """The paragraph of a command in the page of `gradwire`."""
    return f".TP\n.BR gradwire\\-{name} (1)\n{escape(summary(function_of(name)))}"


def gradwire_page() -> str:
    """The page of the command itself."""
    lines = [
        title("gradwire", 1),
        ".SH NAME",
        f"gradwire \\- {escape(lower_first(summary(gradwire)))}",
        ".SH SYNOPSIS",
        "\\fBgradwire\\fR \\fIcommand\\fR [\\fIoptions\\fR]",
        ".SH COMMANDS",
        *map(command_line, LIBRARY_COMMANDS),
        ".SH COMMANDS OF GRADWIRE-LAB",
        *map(command_line, LAB_COMMANDS),
        ".SH OPTIONS",
        ".TP\n\\fB\\-\\-version\\fR\nPrint the version.",
        ".TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nList the commands.",
        ".SH EXIT STATUS",
        escape(EXIT_STATUS),
        ".SH SEE ALSO",
        ".BR gradwire (3)",
    ]
    return "\n".join(lines) + "\n"


# ---- section 3 ------------------------------------------------------------------------------

_SECTION = re.compile(r"^/\* -{4} (.*?) -+ \*/$")


def read_blocks(header: str) -> Iterator[tuple[str, str]]:
    """("section" | "comment" | "code", text) of a C header, in order, without its include guard."""
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", header, flags=re.DOTALL)
    text = re.sub(r"#if defined\(__GNUC__\).*?#endif\n", "", text, flags=re.DOTALL)
    text = re.sub(
        r"^#(?:ifndef|define|endif).*GRADWIRE_GRADWIRE_(?:MPI_)?H_.*\n",
        "",
        text,
        flags=re.MULTILINE,
    )
    for block in re.split(r"\n\s*\n(?=\S)", text.strip()):
        rest = block.strip()
        while rest:
            comment = re.match(r"/\*.*?\*/", rest, re.DOTALL)
            if comment is None:
                # The code ends at the next comment that begins a line.
                code = re.split(r"\n(?=/\*)", rest, maxsplit=1)
                yield "code", code[0].replace("GW_API ", "")
                rest = code[1] if len(code) == 2 else ""
                continue
            section = _SECTION.match(comment.group())
            if section:
                yield "section", section.group(1)
            else:
                yield "comment", comment.group()
            rest = rest[comment.end() :].strip()


def plain_comment(comment: str) -> str:
    """The text of a C comment in paragraphs; indented lines stay as they are."""
    lines = [re.sub(r"^ ?\* ?", "", line) for line in comment[2:-2].split("\n")]
    if not comment.startswith("/*\n"):
        lines = [re.sub(r"^ {3}", "", line) for line in lines]
    text = "\n".join(line.rstrip() for line in lines).strip()
    parts = []
    for part in re.split(r"\n\s*\n", text):
        head, *example = (
            re.split(r"\n(?= {2})", part, maxsplit=1) if not part.startswith(" ") else ("", part)
        )
        if head:
            parts.append(escape(" ".join(head.split())))
        if example:
            parts.append(f".nf\n{escape(example[0])}\n.fi")
    return "\n.PP\n".join(parts)


def header_page(path: Path, summary: str, see_also: str) -> str:
    """The page of a header in section 3, with the header's text in the same order."""
    header = path.read_text(encoding="utf-8")
    name = path.stem
    lines = [
        title(name, 3, path.name),
        ".SH NAME",
        f"{name} \\- {escape(summary)}",
        ".SH SYNOPSIS",
        f".nf\n.B #include <gradwire/{path.name}>\n.fi",
        ".PP",
        f"\\fBcc\\fR \\fIfile.c\\fR $(\\fBpkg\\-config \\-\\-cflags \\-\\-libs {name}\\fR)",
        ".SH DESCRIPTION",
    ]
    for kind, text in read_blocks(header):
        if kind == "section":
            lines.append(f".SH {text.upper()}")
        elif kind == "comment":
            lines += [".PP", plain_comment(text)]
        elif "#include" not in text:
            lines += [
                ".PP",
                ".nf",
                *(f"\\fB{escape(line)}\\fR" for line in text.split("\n")),
                ".fi",
            ]
    lines += [".SH SEE ALSO", see_also]
    return "\n".join(lines) + "\n"


def make_pages() -> dict[Path, str]:
    """Path and content of every page."""
    folders = dict.fromkeys(LIBRARY_COMMANDS, MAN) | dict.fromkeys(LAB_COMMANDS, LAB_MAN)
    pages = {folders[name] / f"gradwire-{name}.1": command_page(name) for name in folders}
    in_c = header_page(
        HEADER,
        "compression of gradients, and exchanges between ranks, in C",
        ".BR gradwire (1),\n.BR gradwire_mpi (3)",
    )
    over_mpi = header_page(MPI_HEADER, "compressed collectives over MPI, in C", ".BR gradwire (3)")
    others = {"gradwire.1": gradwire_page(), "gradwire.3": in_c, "gradwire_mpi.3": over_mpi}
    return pages | {MAN / name: text for name, text in others.items()}


def main(arguments: list[str]) -> int:
    """Command line entry point; returns the exit status."""
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    pages = make_pages()
    found = (path for folder in (MAN, LAB_MAN) for path in folder.glob("*.[0-9]"))
    present = {path: path.read_text(encoding="utf-8") for path in found}
    stale = sorted(path for path in pages | present if pages.get(path) != present.get(path))
    for path in stale:
        verdict = "not current; run scripts/make_man.py" if arguments else "written"
        print(f"{path.relative_to(ROOT)}: {verdict}")
        if arguments:
            continue
        if path in pages:
            path.write_text(pages[path], encoding="utf-8")
        else:
            path.unlink()
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
