"""``gradwire decompress``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import gradwire
from gradwire.cli.compress import SUFFIX
from gradwire.cli.output import (
    ForceOption,
    JsonOption,
    OutputOption,
    Outputs,
    ThreadsOption,
    errors_name,
    human_bytes,
    print_json,
    report_beside,
    say,
)
from gradwire.container import ContainerError, Tensor, TensorFile, check_frames, parse
from gradwire.errors import UserError
from gradwire.files import replace_file
from gradwire.tensor_dtypes import FRAME_DTYPES, Kind
from gradwire.tensor_files import kind_of, write_tensor_file

_MAX_VALUES_HELP = (
    "Refuse a file whose compressed tensors have more values in all: a few bytes can stand for "
    "many zeros. Default: 2^28, or 256 for each byte of the file if these are more."
)
_SAFE_VALUES = 2**28
_SAFE_VALUES_PER_BYTE = 256  # more than the codecs reach unless nearly all values are zeros


def decompress(
    files: Annotated[
        list[Path], Argument(metavar="FILE", help="Files written by `gradwire compress`.")
    ],
    output: OutputOption = None,
    threads: ThreadsOption = 1,
    max_values: Annotated[
        int | None, Option(min=1, help=_MAX_VALUES_HELP, show_default=False)
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Restore what compress wrote.

    The .npy or .safetensors file that compress read comes back, with the values it kept.
    """
    outputs = Outputs(output, len(files), force)
    reports = []
    for path in files:
        with errors_name(path):
            data = path.read_bytes()
            content = parse(data)
            check_frames(content)
            safe_values = max(_SAFE_VALUES, _SAFE_VALUES_PER_BYTE * len(data))
            _check_values(content, max_values or safe_values)
        target = outputs.claim(path, partial(_restored_name, f".{content.kind}"))
        if kind_of(target) != content.kind:
            raise UserError(f"{path} holds a .{content.kind} file, not {target.suffix}")
        with errors_name(path), replace_file(target) as file:
            write_tensor_file(content, file, partial(_restore, content.kind, threads))
        size, count = file.size, len(content.tensors)
        reports.append({"input": str(path), "output": str(target), "bytes": size, "tensors": count})
        if not as_json:
            with report_beside(target):
                say(f"{path} -> {target}: {human_bytes(size)}, tensors: {count}")
    if as_json:
        with report_beside(target):
            print_json({"files": reports})


def _restored_name(suffix: str, name: str) -> str:
    return name.removesuffix(SUFFIX).removesuffix(suffix) + suffix


def _check_values(content: TensorFile, max_values: int) -> None:
    """Refuses the file before memory is taken for its first tensor."""
    values = sum(tensor.numel for tensor in content.tensors if tensor.storage == "frame")
    if values > max_values:
        raise ContainerError(
            "limit_exceeded",
            f"its compressed tensors have {values} values in all; --max-values allows {max_values}",
        )


def _restore(kind: Kind, threads: int, tensor: Tensor) -> bytes | memoryview:
    """The plain bytes of a tensor. One tensor after the other is restored and written, so that the
    memory is that of the largest."""
    if tensor.storage == "plain":
        return tensor.data
    where = f"tensor {tensor.name!r}"
    dtype = FRAME_DTYPES[kind][tensor.dtype]
    try:
        values = gradwire.decode(tensor.data, threads=threads, max_numel=tensor.numel, dtype=dtype)
    except gradwire.GradwireError as error:
        raise ContainerError(error.code, f"{where}: {error}") from None
    except MemoryError:
        raise UserError(f"{where}: {tensor.numel} values need more memory than there is") from None
    return values.astype(values.dtype.newbyteorder("<"), copy=False).data.cast("B")
