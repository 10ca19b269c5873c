"""``gradwire decompress``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import gradwire
from gradwire.cli.compress import SUFFIX
from gradwire.cli.output import CommandError, ForceOption, JsonOption, human_bytes, print_json
from gradwire.cli.output_file import Outputs, replace_file
from gradwire.container import FRAME_DTYPES, Container, ContainerError, Kind, StoredTensor, parse
from gradwire.tensor_files import Tensor, TensorFile, kind_of, write_tensor_file


def decompress(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="Files written by `gradwire compress`.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write: a file, or a directory if there are several inputs. "
            "Default: beside each input, without .gw.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads.")] = 1,
    max_values: Annotated[
        int,
        typer.Option(
            min=1, help="Refuse a tensor with more values: a few bytes can stand for many zeros."
        ),
    ] = 2**31,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Restore the .npy or .safetensors files that compress read, with the values it kept."""
    outputs = Outputs(output, len(files), force)
    reports = []
    for path in files:
        container = _read_container(path)
        target = outputs.claim(path, _restored_name(path, container))
        if kind_of(target) != container.kind:
            raise CommandError(f"{path} holds a .{container.kind} file, not {target.suffix}")
        content = _decode_tensors(path, container, threads, max_values)
        size = replace_file(target, partial(write_tensor_file, content))
        count = len(content.tensors)
        reports.append({"input": str(path), "output": str(target), "bytes": size, "tensors": count})
        if not as_json:
            print(f"{path} -> {target}: {human_bytes(size)}, tensors: {count}")
    if as_json:
        print_json({"files": reports})


def _read_container(path: Path) -> Container:
    try:
        return parse(path.read_bytes())
    except ContainerError as error:
        raise CommandError(f"{path}: {error}") from None


def _restored_name(path: Path, container: Container) -> str:
    """x.npy.gw -> x.npy; any other name gets the ending of the kind."""
    name = path.name.removesuffix(SUFFIX)
    return name if name.endswith(f".{container.kind}") else f"{name}.{container.kind}"


def _decode_tensors(path: Path, container: Container, threads: int, max_values: int) -> TensorFile:
    tensors = []
    for stored in container.tensors:
        data = stored.data
        if stored.storage == "frame":
            data = _decode(path, stored, container.kind, threads, max_values)
        tensors.append(Tensor(stored.name, stored.dtype, stored.shape, data))
    return TensorFile(container.kind, tuple(tensors), container.metadata)


def _decode(
    path: Path, stored: StoredTensor, kind: Kind, threads: int, max_values: int
) -> memoryview:
    where = f"{path}: tensor {stored.name!r}"
    if stored.numel > max_values:
        raise CommandError(f"{where} has {stored.numel} values; --max-values allows {max_values}")
    try:
        frame = gradwire.inspect(stored.data)
        stored.check_frame(frame["numel"], frame["dtype"])
        dtype = FRAME_DTYPES[kind][stored.dtype]
        values = gradwire.decode(stored.data, threads=threads, max_numel=max_values, dtype=dtype)
    except ContainerError as error:
        raise CommandError(f"{path}: {error}") from None
    except gradwire.GradwireError as error:
        raise CommandError(f"{where}: {error}") from None
    return values.astype(values.dtype.newbyteorder("<"), copy=False).data.cast("B")
