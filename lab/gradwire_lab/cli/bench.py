"""``gradwire bench``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import groupby, product
from typing import Annotated, Any

import numpy as np
from typer import BadParameter, Option

import gradwire
from gradwire.cli.output import (
    JsonOption,
    check_codec,
    complete_codec,
    describe_compilation,
    human_bytes,
    print_json,
    print_pairs,
    print_table,
    significant,
)
from gradwire.errors import missing
from gradwire.machine import describe_build, describe_machine
from gradwire_lab.bench import CODECS, OPERATIONS, SIZES, Case, Measurement, Workload, measure
from gradwire_lab.bench_data import BenchData, load_data
from gradwire_lab.bench_deltas import CHANGES, DeltaRow
from gradwire_lab.bench_deltas import measure as measure_delta
from gradwire_lab.cli.progress import ProgressOfSteps
from gradwire_lab.cli.quantities import parse_count

_LARGEST_SIZE = 2**31


# The longer descriptions of options.
_CODEC_HELP = f"Codec to measure (repeatable). Default: {', '.join(CODECS)}."
_SIZE_HELP = (
    "Number of float32 values, such as 5000, 200k or 25.6M (repeatable). Default: 200k, 25.6M."
)
_OPERATION_HELP = (
    "encode (with the residual, where the codec keeps one) or decode_add (repeatable). "
    "Default: both."
)
_TARGET_HELP = "SIMD target (repeatable), or all. `gradwire info` lists them. Default: the best."
_DATA_HELP = (
    "recorded (gradients of a real training run, in the source tree), synthetic (made, with a "
    "heavy tail), a .safetensors or .npy file, or auto: recorded where the source tree is at hand, "
    "else synthetic."
)

_DELTAS_HELP = (
    "Measure deltas instead, on one thread: weights in bfloat16 before and after a step of Adam, "
    "and float32 weights and states. Default size: 25.6M. XOR with zstd and zipnn are measured "
    "beside them where the packages zstandard and zipnn are installed."
)
_SIZE_OF_DELTAS = 25_600_000


def bench(
    codec: Annotated[
        list[str] | None, Option("--codec", "-c", help=_CODEC_HELP, autocompletion=complete_codec)
    ] = None,
    size: Annotated[list[str] | None, Option(help=_SIZE_HELP)] = None,
    operation: Annotated[list[str] | None, Option(help=_OPERATION_HELP)] = None,
    target: Annotated[list[str] | None, Option(help=_TARGET_HELP)] = None,
    threads: Annotated[
        list[int] | None, Option(min=1, max=256, help="Thread count (repeatable). Default: 1, 2.")
    ] = None,
    data: Annotated[str, Option(help=_DATA_HELP)] = "auto",
    deltas: Annotated[bool, Option("--deltas", help=_DELTAS_HELP)] = False,
    seconds: Annotated[float, Option(min=0.01, help="Time for each line of the table.")] = 0.5,
    seed: Annotated[int, Option(min=0, help="Seed of the data and of its windows.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure encode and decode_add next to memcpy.

    Each result is checked before it is timed. GB/s count the float32 side, 4 bytes a value, and
    10^9 bytes are a GB. memcpy copies as many values in the same process, on one thread.
    """
    if deltas:
        if codec or operation or target or threads or data != "auto":
            raise BadParameter(
                "goes with --size, --seconds, --seed and --json", param_hint="--deltas"
            )
        numels = [parse_count(text, "--size", _LARGEST_SIZE) for text in size or ()]
        _bench_deltas(numels or [_SIZE_OF_DELTAS], seconds, seed, as_json)
        return
    for name in codec or ():
        check_codec(name)
    sizes = [parse_count(text, "--size", _LARGEST_SIZE) for text in size] if size else SIZES
    operations = _choose("--operation", operation, OPERATIONS)
    targets, counts = _choose_targets(target), threads or (1, 2)
    # The cases of one codec and size follow each other, so that they share a Workload.
    planned = [
        Case(name, numel, *other)
        for numel, name in product(sizes, codec or CODECS)
        for other in product(operations, targets, counts)
    ]
    values = load_data(data, seed)
    header = _header(values)
    if not as_json:
        _print_header(header)
    measured = _measure_all(planned, values, seconds, seed)
    rows = [_as_row(case, measured) for case in measured]
    if as_json:
        print_json(header | {"results": rows})
    else:
        _print_measurements(rows)


def _bench_deltas(sizes: list[int], seconds: float, seed: int, as_json: bool) -> None:
    header = _header(BenchData("deltas", f"made, seed {seed}", np.zeros(1, np.float32)))
    if not as_json:
        _print_header(header)
    if find_spec("zstandard") is None:
        lacking = missing("zstandard", "'./lab[bench]'")
        print(f"bench: XOR with zstd is left out: {lacking}", file=sys.stderr)
    rows = []
    planned = [(change, numel) for numel in sizes for change in CHANGES]
    with ProgressOfSteps(len(planned), is_shown=sys.stderr.isatty()) as progress:
        for change, numel in planned:
            progress.begin(f"delta {change} {numel}")
            rows.append(measure_delta(change, numel, seconds, seed))
            progress.end_step()
    if as_json:
        print_json(header | {"results": [asdict(row) for row in rows]})
    else:
        _print_deltas(rows)


def _print_deltas(rows: list[DeltaRow]) -> None:
    print_table(
        (
            *("change", "values", "changed", "bits/change", "entropy", "encode GB/s", "of memcpy"),
            *("apply GB/s", "of memcpy", "decoded GB/s", "memcpy GB/s"),
        ),
        [
            (
                *(row.change, f"{row.numel:,}", f"{100 * row.changed:.3g} %"),
                *(significant(row.bits), significant(row.entropy) if row.entropy else "-"),
                *(significant(row.encode), f"{row.encode_of_memcpy:.2f}"),
                *(significant(row.apply), f"{row.apply_of_memcpy:.2f}"),
                *(significant(row.apply_decoded), significant(row.memcpy)),
            )
            for row in rows
        ],
        left=range(1),
        keys=2,
    )
    others = [(row, name, *found) for row in rows for name, found in row.others.items()]
    if others:
        print_table(
            (
                *("change", "values", "compressor", "bits/change", "GB/s", "encode / this"),
                *("back GB/s", "apply / this"),
            ),
            [
                (
                    *(row.change, f"{row.numel:,}", name, significant(bits)),
                    *(significant(there), significant(row.encode / there)),
                    *(significant(back), significant(row.apply / back)),
                )
                for row, name, bits, there, back in others
            ],
            left=[0, 2],
            keys=3,
        )
    print(
        "memcpy moves two arrays, encode three, apply two: 'of memcpy' compares bytes moved.\n"
        "decoded: apply, of a delta that was decoded before."
    )


def _measure_all(
    planned: list[Case], values: BenchData, seconds: float, seed: int
) -> dict[Case, Measurement]:
    measured = {}
    with ProgressOfSteps(len(planned), is_shown=sys.stderr.isatty()) as progress:
        for (codec, numel), cases in groupby(planned, lambda case: (case.codec, case.numel)):
            work = Workload(codec, numel, values, seed)
            for case in cases:
                progress.begin(f"{codec} {case.operation} {numel}")
                measured[case] = measure(work, case, seconds)
                progress.end_step()
            del work  # frees its memory before the next Workload takes memory
    return measured


def _choose(option: str, given: list[str] | None, valid: tuple[str, ...]) -> tuple[str, ...]:
    for name in given or ():
        if name not in valid:
            raise BadParameter(
                f"{name} is not valid; valid are {', '.join(valid)}", param_hint=option
            )
    return tuple(given) if given else valid


def _choose_targets(given: list[str] | None) -> tuple[str, ...]:
    available = tuple(gradwire.simd_targets())
    if not given:
        return available[:1]
    if "all" in given:
        return available
    return _choose("--target", given, available)


def _header(values: BenchData) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "build": describe_build(),
        "command": shlex.join(["gradwire", *sys.argv[1:]]),
        "data": values.description,
    }


def _print_header(header: dict[str, Any]) -> None:
    machine, build = header["machine"], header["build"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    print_pairs(
        [
            ("machine", f"{machine['cpu']}, {machine['cores']} cores, {caches}"),
            ("system", f"{machine['system']}, memory {human_bytes(machine['memory_bytes'])}"),
            ("build", f"gradwire {build['version']}, {describe_compilation(build)}"),
            ("commit", build["commit"]),
            ("command", header["command"]),
            ("data", header["data"]),
        ]
    )


def _as_row(case: Case, measured: dict[Case, Measurement]) -> dict[str, Any]:
    own = measured[case]
    one_thread = measured.get(replace(case, threads=1)) if case.threads > 1 else None
    return {
        **asdict(case),
        **asdict(own),
        "speed_up": one_thread.seconds / own.seconds if one_thread else None,
        "call_overhead_share": own.call_overhead / own.seconds,
    }


def _print_measurements(rows: list[dict[str, Any]]) -> None:
    lines: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = tuple(row[name] for name in ("codec", "target", "numel", "threads"))
        lines.setdefault(place, {})[row["operation"]] = row
    print_table(
        (
            *("codec", "target", "values", "threads", "bits/value", "ratio", "rel. error"),
            *("encode GB/s", "of memcpy", "decode_add GB/s", "of memcpy", "memcpy GB/s"),
        ),
        [
            (*place[:2], f"{place[2]:,}", place[3], *_cells(operations))
            for place, operations in lines.items()
        ],
        left=range(2),
        keys=4,
    )
    if any(row["parallel_memcpy_gb_per_s"] for row in rows):
        print("In brackets: memcpy on as many threads, the limit that memory sets.")


def _cells(operations: dict[str, dict[str, Any]]) -> list[str]:
    """The cells of a line, from the column bits/value on."""
    last = list(operations.values())[-1]
    bits = last["bits_per_value"]
    cells = [significant(bits), significant(32 / bits), significant(last["relative_error"])]
    for name in OPERATIONS:
        row = operations.get(name)
        cells += (
            [significant(row["gb_per_s"]), f"{row['share_of_memcpy']:.2f}"] if row else ["-"] * 2
        )
    parallel = last["parallel_memcpy_gb_per_s"]
    memcpy = significant(last["memcpy_gb_per_s"])
    return [*cells, f"{memcpy} ({significant(parallel)})" if parallel else memcpy]
