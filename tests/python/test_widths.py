"""Tables of all commands lose nothing in narrow terminals and in pipes."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

import gradwire
from cli_runner import run
from gradwire import table
from gradwire.cli.app import list_commands, make_command
from gradwire.container import Tensor, TensorFile, serialize
from gradwire.table import Table
from gradwire_lab.progress_line import ProgressLine
from gradwire_lab.train import report_table
from test_plan import profile_of
from test_train_report import PARAMETERS, SETTINGS, SHAPED, assemble, records
from test_train_results import fill

WIDTHS = (60, 80, 100, 120, None)  # None: a pipe
CODEC = "3lc:s=1.00,coder=rice"
NAMES = ("model.layers.10.self_attn.q_proj.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the commands read."""
    made = tmp_path_factory.mktemp("files")
    profile_of(8_000_000).write(made / "profile.json")
    fill(made / "results")
    values = np.linspace(-1, 1, 123_456, dtype=np.float32)
    frame = gradwire.encode(values, CODEC)
    (made / "x.gwf").write_bytes(frame)
    tensors = tuple(Tensor(name, "F32", values.shape, frame, "frame") for name in NAMES)
    (made / "x.gw").write_bytes(b"".join(serialize(TensorFile("safetensors", tensors))))
    np.save(made / "x.npy", values)
    return made


COMMANDS = {
    "codecs": "codecs --all",
    "usual codecs": "codecs",
    "plan": "plan --profile profile.json --bandwidth 1gbit --ranks 16 --ranks-per-machine 2",
    "simulate": "simulate --values 100k --bandwidth 1gbit --steps 1 --ranks 2,16",
    "bench": "bench -c qsgd:bits=4 --size 100k --seconds 0.01 --data synthetic",
    "inspect": "inspect x.gw",
    "compress": f"compress -v -f x.npy -c {CODEC}",
    "report": "report results",
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_every_cell_at_every_width(
    command: str, width: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Table] = []

    def note(*given: object, **named: object) -> Table:
        shown.append(Table(*given, **named))  # type: ignore[arg-type]
        return shown[-1]

    monkeypatch.setattr("gradwire.cli.output.Table", note)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    done = run(*COMMANDS[command].split())
    assert done.code == 0, done.err
    assert shown
    for one in shown:
        check(one, done.out, width or 160)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_the_report_of_a_training_has_every_cell_at_every_width(width: int) -> None:
    made = report_table.table(assemble(SETTINGS, PARAMETERS, SHAPED, records()))
    console = Console(width=width)
    with console.capture() as capture:
        console.print(made)
    check(made, capture.get(), width)


def check(shown: Table, out: str, width: int) -> None:
    """Whether all cells are in the output, those of the first column at the beginning of a line,
    and the lines fit."""
    lines = [line for line in out.splitlines() if line.startswith(" " * shown.indent)]
    firsts = {line.split()[0] for line in lines if line.strip()}
    numbers = [i for i in range(len(shown.titles)) if i not in shown.left]
    for row in shown.rows:
        assert row[0].split()[0] in firsts
        for i in numbers:
            assert any(f" {row[i]}" in f" {line}" for line in lines), row[i]
        for i in shown.left:
            for word in row[i].split():
                assert word in out
    assert "…" not in out
    for line in lines:
        if "──" in line:
            assert len(line) <= width


def test_a_terminal_is_filled_and_not_more() -> None:
    """A real terminal, whose width the process asks for."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", "from gradwire.cli import main; main(['codecs'])"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        out = b""
        while part := read(ours):
            out += part
    os.close(ours)
    assert process.returncode == 0
    lines = [line for line in out.decode().splitlines() if "──" in line]
    assert lines
    assert max(map(len, lines)) <= 60


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


def test_wide_characters_and_names_longer_than_the_terminal() -> None:
    name = "模型." * 30 + "weight"
    shown = Table(("tensor", "bytes"), [[name, "1,234,567"], ["b", "12"]])
    console = Console(width=40)
    with console.capture() as capture:
        console.print(shown, soft_wrap=True)
    first, second = capture.get().splitlines()[2:]
    assert first == f"{name}  1,234,567"
    assert table._width(second) == table._width(first)


@pytest.mark.parametrize(("encoding", "rule"), [("ascii", "---"), ("utf-8", "───")])
def test_a_table_has_letters_that_the_terminal_has(encoding: str, rule: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    Console(file=file, width=40).print(Table(["one"], [["1"]]))
    file.seek(0)
    assert [line.rstrip() for line in file] == ["one", rule, "1"]


def test_a_table_without_rows_has_its_titles() -> None:
    console = Console(width=5)
    with console.capture() as capture:
        console.print(Table(("tensor", "bytes"), []), soft_wrap=True)
    assert capture.get().splitlines()[0] == "tensor  bytes"


def test_titles_break_before_texts_and_texts_before_the_table() -> None:
    shown = Table(("codec", "bits a value"), [[CODEC, "0.5"]], codecs=(0,))

    def at(width: int) -> list[str]:
        console = Console(width=width)
        with console.capture() as capture:
            console.print(shown)
        return capture.get().splitlines()

    assert at(35)[0].split() == ["codec", "bits", "a", "value"]
    assert at(28)[0].split() == ["codec", "bits"]
    assert at(28)[4].split() == [CODEC, "0.5"]
    assert at(20)[4].split() == ["3lc:s=1.00,", "0.5"]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_progress_cuts_nothing_but_its_bar_and_times(width: int) -> None:
    console = Console(width=width, force_terminal=True)
    state = "loss 2.276  test accuracy 17.95%"
    with console.capture() as capture:
        progress = Progress(ProgressLine(console), console=console)
        progress.add_task("3lc:s=1.75,coder=rice", total=25_600, completed=12_800, state=state)
        console.print(progress.get_renderable())
    assert all(part in capture.get() for part in ("3lc:s=1.75,coder=rice", "12800/25600", state))
    assert "…" not in capture.get()
    assert ("━" in capture.get()) == (width >= 100)


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("command", list_commands())
def test_the_help_of_a_command_cuts_no_option_and_no_default(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run(command, "--help").out
    assert "…" not in shown
    options = [one.opts[0] for one in make_command(command).params]
    assert [option for option in options if option[:1] == "-" and option not in shown] == []
