"""``gradwire compress``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from typer import Argument, Option

import gradwire
from gradwire.cli.output import (
    ForceOption,
    JsonOption,
    OutputOption,
    Outputs,
    ThreadsOption,
    check_codec,
    complete_codec,
    errors_name,
    human_bytes,
    print_json,
    print_table,
    report_beside,
    say,
    significant,
    warn,
)
from gradwire.container import Tensor, TensorFile, check_content, serialize
from gradwire.errors import UserError
from gradwire.files import replace_file
from gradwire.tensor_dtypes import FRAME_DTYPES
from gradwire.tensor_files import read_tensor_file, values_of, widen

SUFFIX = ".gw"

_SLICE = 1 << 20
# A larger relative error, with more than half of the squared norm lost, gets a warning.
_LARGE_ERROR = math.sqrt(0.5)


_CODEC_HELP = "Codec and parameters, such as bf16 or 3lc:s=1.00; see `gradwire codecs`."
_PLAIN_HELP = "Store tensors whose name matches as they are (shell pattern, repeatable)."


def compress(
    files: Annotated[list[Path], Argument(metavar="FILE", help=".npy or .safetensors files.")],
    codec: Annotated[str, Option("--codec", "-c", help=_CODEC_HELP, autocompletion=complete_codec)],
    output: OutputOption = None,
    plain: Annotated[list[str] | None, Option(metavar="PATTERN", help=_PLAIN_HELP)] = None,
    threads: ThreadsOption = 1,
    force: ForceOption = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Report each tensor, not only each file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compress .npy and .safetensors files.

    float32, float16 and bfloat16 tensors are encoded, and lose the precision that the codec gives
    up; all other tensors are stored as they are. Names, shapes and dtypes are kept. The error is
    measured by decoding the frames that were written.
    """
    check_codec(codec)
    outputs = Outputs(output, len(files), force)
    reports = []
    unmatched = plain or []
    for path in files:
        target = outputs.claim(path, lambda name: name + SUFFIX)
        with errors_name(path):
            content = read_tensor_file(path)
            check_content(content)
            names = [tensor.name for tensor in content.tensors]
            unmatched = [p for p in unmatched if not any(_matches(name, p) for name in names)]
            if unmatched and path is files[-1]:  # another file may have had such a tensor
                raise UserError(f"no tensor matches --plain {unmatched[0]!r}")
            stored, rows = _encode_tensors(path, content, codec, plain or [], threads)
            with replace_file(target) as file:
                for part in serialize(replace(content, tensors=stored)):
                    file.write(part)
        report = _report(path, target, file.size, codec, rows)
        reports.append(report)
        if not as_json:
            with report_beside(target):
                _print_report(report, verbose)
    if as_json:
        with report_beside(target):
            print_json({"files": reports})


def _encode_tensors(
    path: Path, content: TensorFile, codec: str, plain: Sequence[str], threads: int
) -> tuple[tuple[Tensor, ...], list[dict[str, Any]]]:
    """Returns the tensors to store, and the report's row of each."""
    stored = []
    rows = []
    for tensor in content.tensors:
        dtype = FRAME_DTYPES[content.kind].get(tensor.dtype)
        matching = [p for p in plain if _matches(tensor.name, p)]
        reason = f"--plain {matching[0]}" if matching else ""
        if dtype is None:
            reason = f"dtype {tensor.dtype}"
        row = tensor.describe() | {"bytes": len(tensor.data), "reason": reason}
        kept = tensor
        if dtype is not None and not reason:
            kept, errors = _encode(path, tensor, dtype, codec, threads)
            row |= errors
        stored.append(kept)
        rows.append(row | {"storage": kept.storage, "stored_bytes": len(kept.data)})
    return tuple(stored), rows


def _matches(name: str, pattern: str) -> bool:
    # fnmatch would read a name's brackets as a set of characters, so it is compared first.
    return name == pattern or fnmatchcase(name, pattern)


def _encode(
    path: Path, tensor: Tensor, dtype: str, codec: str, threads: int
) -> tuple[Tensor, dict[str, Any]]:
    """Returns the tensor as a frame, and its errors."""
    values = values_of(tensor, dtype)
    place = f"{path}: tensor {tensor.name!r}:" if tensor.name else f"{path}:"
    advice = f"--plain '{tensor.name}'" if tensor.name else "--codec raw"
    instead = f"{advice} stores it as it is"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bits = dtype if values.dtype == np.uint16 else None
        frame = gradwire.encode(values, codec, threads=threads, dtype=bits)
    if gradwire.inspect(frame)["non_finite"]:
        # A marker would decode the whole tensor to NaN, and a file has no next step to repair it.
        raise UserError(f"{place} {caught[0].message}; {codec} cannot carry that, {instead}")
    errors = _errors(values, gradwire.decode(frame, threads=threads, dtype=dtype))
    if math.isinf(errors["max_error"]):
        raise UserError(f"{place} {codec} makes finite values infinite in {dtype}; {instead}")
    return replace(tensor, data=frame, storage="frame"), errors


def _errors(x: NDArray[Any], decoded: NDArray[Any]) -> dict[str, Any]:
    """Squared norms of the values and of the error, in float64, and the largest error.

    The decoded values are those of the tensor's own dtype, so rounding to it counts. NaN and Inf,
    which some codecs carry, count neither as value nor as error.
    """
    energy = error = largest = 0.0
    for start in range(0, x.size, _SLICE):
        part = widen(x[start : start + _SLICE])
        finite = np.isfinite(part)
        part = part[finite].astype(np.float64)
        difference = part - widen(decoded[start : start + _SLICE])[finite]
        energy += float(np.dot(part, part))
        error += float(np.dot(difference, difference))
        largest = max(largest, float(np.abs(difference).max(initial=0)))
    return {"squared_norm": energy, "squared_error": error, "max_error": largest}


def _report(
    path: Path, target: Path, written: int, codec: str, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    encoded = [row for row in rows if row["storage"] == "frame"]
    energy = sum(row["squared_norm"] for row in encoded)
    error = sum(row["squared_error"] for row in encoded)
    for row in encoded:
        row["relative_error"] = _relative(row.pop("squared_error"), row.pop("squared_norm"))
        values = math.prod(row["shape"])
        row["bits_per_value"] = 8 * row["stored_bytes"] / values if values else None
    size = path.stat().st_size or sum(row["bytes"] for row in rows)  # a pipe has no size
    return {
        "input": str(path),
        "output": str(target),
        "codec": codec,
        "bytes": size,
        "stored_bytes": written,
        "ratio": size / written,
        "relative_error": _relative(error, energy),
        "max_error": max((row["max_error"] for row in encoded), default=None),
        "tensors": rows,
    }


def _relative(squared_error: float, squared_norm: float) -> float | None:
    """|x - decoded| / |x|; 0 without an error, None if all values are 0 but the error is not."""
    if squared_error == 0:
        return 0.0
    ratio = squared_error / squared_norm if squared_norm else math.inf
    return math.sqrt(ratio) if math.isfinite(ratio) else None


def _remedy(codec: str) -> str:
    """How training makes up for a large error, which a file cannot."""
    if gradwire.Compressor(codec, 0).residual is None:
        return "In training, errors of many steps and workers may cancel out; a file is one step"
    return "In training, error feedback makes up for it in later steps; a file has no later steps"


def _print_report(report: dict[str, Any], verbose: bool) -> None:
    rows = report["tensors"]
    if verbose:
        print_table(
            ("tensor", "shape", "dtype", "stored as", "bytes", "bits/value", "ratio", "rel. error"),
            [
                (
                    row["name"] or "-",
                    "x".join(map(str, row["shape"])) or "scalar",
                    row["dtype"],
                    f"is ({row['reason']})" if row["reason"] else report["codec"],
                    row["stored_bytes"],
                    significant(row.get("bits_per_value")),
                    significant(
                        row["bytes"] / row["stored_bytes"] if row["stored_bytes"] else None
                    ),
                    significant(row.get("relative_error")),
                )
                for row in rows
            ],
            left=range(4),
        )
    say(
        f"{report['input']} -> {report['output']}: {human_bytes(report['bytes'])} -> "
        f"{human_bytes(report['stored_bytes'])}, ratio {significant(report['ratio'])}, "
        f"relative error {significant(report['relative_error'])}"
    )
    if (report["relative_error"] or 0) > _LARGE_ERROR:
        warn(f"{report['input']}: most of the values' energy is lost. {_remedy(report['codec'])}")
    as_they_are = [row for row in rows if row["reason"]]
    if as_they_are and not verbose:
        reasons = sorted({row["reason"] for row in as_they_are})
        warn(
            f"{report['input']}: {len(as_they_are)} of {len(rows)} tensors stored as they are "
            f"({', '.join(reasons)})"
        )
