"""``gradwire inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument

import gradwire
from gradwire.cli.output import (
    JsonOption,
    errors_name,
    print_json,
    print_pairs,
    print_table,
    significant,
)
from gradwire.container import check_frames, is_container, parse
from gradwire.errors import UserError
from gradwire.weights.update import read_update, starts_update

# Columns of text, not of numbers.
_TEXTS = ("name", "dtype", "shape", "storage", "kind", "codec", "class_shares")
_FILE_HELP = "A frame, a packet, a compressed file or a delta."
_TOLD_BY = 64  # bytes that show the kind of a file
_OF_FRAMES = ("codec", "bits_per_value", "non_finite", "class_shares")


def inspect(
    file: Annotated[Path, Argument(metavar="FILE", help=_FILE_HELP)],
    as_json: JsonOption = False,
) -> None:
    """Show what is in a frame, a packet, a compressed file or a delta.

    Checks lengths and checksums; decodes nothing.
    """
    with errors_name(file):
        data = _read(file)
        found = _inspect(data)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _read(path: Path) -> bytes:
    """The whole file, unless its first bytes show that it is of another kind."""
    with path.open("rb") as file:
        begin = file.read(_TOLD_BY)
        if begin[:2] not in (b"GW", b"GP", b"GC") and not starts_update(begin):
            raise UserError(
                "neither a frame ('GW') nor a packet ('GP') nor a compressed file ('GC') "
                "nor a delta"
                f"{_hint(begin)}"
            )
        # Of a pipe, the bytes are there only once. A file would be held twice for a moment.
        return path.read_bytes() if file.seekable() else begin + file.read()


def _hint(data: bytes) -> str:
    """The kind of file, if its first bytes show it."""
    if data[:6] == b"\x93NUMPY":
        return "; it is a .npy file, `gradwire compress` reads those"
    if data[8:9] == b"{":
        return "; it may be a .safetensors file, `gradwire compress` reads those"
    return ""


def _inspect(data: bytes) -> dict[str, Any]:
    if is_container(data):
        return _inspect_container(data)
    return _inspect_delta(data) if starts_update(data) else gradwire.inspect(data)


def _inspect_delta(data: bytes) -> dict[str, Any]:
    update = read_update(data, "the delta")
    tensors = [
        {
            "name": entry.name,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "kind": entry.kind,
            "changed": entry.changed,
            "bytes": entry.size,
            **({"at": list(entry.at), "whole": list(entry.whole)} if entry.at else {}),
        }
        for entry in update.entries.values()
    ]
    return {
        "kind": "full version" if update.base is None else "delta",
        "version": update.version,
        "base": update.base,
        "delta_bytes": len(data),
        "changed": update.changed,
        "values": update.numel,
        "tensors": tensors,
    }


def _inspect_container(data: bytes) -> dict[str, Any]:
    container = parse(data)
    check_frames(container)
    tensors = []
    for tensor in container.tensors:
        entry = tensor.describe() | {"stored_bytes": len(tensor.data)}
        if tensor.storage == "frame":
            frame = tensor.inspect_frame()
            entry |= {key: frame[key] for key in _OF_FRAMES if key in frame}
        tensors.append(entry)
    return {
        "kind": "container",
        "version": 1,
        "restores": container.kind,
        "metadata": container.metadata,
        "container_bytes": len(data),
        "tensors": tensors,
    }


def _print(found: dict[str, Any]) -> None:
    parts = found.get("tensors", found.get("frames"))
    print_pairs(
        (key.replace("_", " "), _text(value))
        for key, value in found.items()
        if key not in ("tensors", "frames") and value != {}
    )
    if not parts:
        return
    columns = list(dict.fromkeys(key for part in parts for key in part))
    print_table(
        [column.replace("_", " ") for column in columns],
        [[_text(part.get(column)) for column in columns] for part in parts],
        left=[i for i, column in enumerate(columns) if column in _TEXTS],
    )


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return significant(value)
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    return str(value)
