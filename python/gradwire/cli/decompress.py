"""``gradwire decompress``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import gradwire
from gradwire.cli.compress import SUFFIX
from gradwire.cli.output import ForceOption, JsonOption, human_bytes, print_json, say
from gradwire.cli.output_file import OutputOption, Outputs
from gradwire.container import FRAME_DTYPES, ContainerError, Kind, Tensor, parse
from gradwire.errors import UserError
from gradwire.files import replace_file
from gradwire.tensor_files import kind_of, write_tensor_file

_MAX_VALUES_HELP = (
    "Refuse a file whose compressed tensors have more values in all: a few bytes can stand for "
    "many zeros."
)


def decompress(
    files: Annotated[
        list[Path], Argument(metavar="FILE", help="Files written by `gradwire compress`.")
    ],
    output: OutputOption = None,
    threads: Annotated[int, Option(min=1, help="Threads.")] = 1,
    max_values: Annotated[int, Option(min=1, help=_MAX_VALUES_HELP)] = 2**31,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Restore what compress wrote.

    The .npy or .safetensors file that compress read comes back, with the values it kept.
    """
    outputs = Outputs(output, len(files), force)
    reports = []
    for path in files:
        try:
            content = parse(path.read_bytes())
            target = outputs.claim(path, _restored_name(path, content.kind))
            if kind_of(target) != content.kind:
                raise UserError(f"{path} holds a .{content.kind} file, not {target.suffix}")
            _check_values(content.tensors, max_values)
            tensors = tuple(_restore(tensor, content.kind, threads) for tensor in content.tensors)
        except ContainerError as error:
            raise UserError(f"{path}: {error}") from None
        with replace_file(target) as file:
            write_tensor_file(replace(content, tensors=tensors), file)
        size, count = file.size, len(tensors)
        reports.append({"input": str(path), "output": str(target), "bytes": size, "tensors": count})
        if not as_json:
            say(f"{path} -> {target}: {human_bytes(size)}, tensors: {count}")
    if as_json:
        print_json({"files": reports})


def _restored_name(path: Path, kind: Kind) -> str:
    """x.npy.gw -> x.npy; a name that lacks the kind's ending gets it."""
    name = path.name.removesuffix(SUFFIX)
    return name if name.endswith(f".{kind}") else f"{name}.{kind}"


def _check_values(tensors: Iterable[Tensor], max_values: int) -> None:
    """Refuses the file before memory is taken for its first tensor."""
    values = sum(tensor.numel for tensor in tensors if tensor.storage == "frame")
    if values > max_values:
        raise ContainerError(
            "limit_exceeded",
            f"its compressed tensors have {values} values in all; --max-values allows {max_values}",
        )


def _restore(tensor: Tensor, kind: Kind, threads: int) -> Tensor:
    if tensor.storage == "plain":
        return tensor
    where = f"tensor {tensor.name!r}"
    try:
        tensor.inspect_frame()
        dtype = FRAME_DTYPES[kind][tensor.dtype]
        values = gradwire.decode(tensor.data, threads=threads, max_numel=tensor.numel, dtype=dtype)
    except gradwire.GradwireError as error:
        raise ContainerError(error.code, f"{where}: {error}") from None
    data = values.astype(values.dtype.newbyteorder("<"), copy=False).data.cast("B")
    return replace(tensor, data=data, storage="plain")
