"""Ratio and speed of general-purpose compressors on the gradients of `gradwire bench`.

    python bench/general_compressors.py [--numel 2000000] [--seconds 1] [--json]

Needs zstandard, lz4, python-snappy and zfpy (`pip install`); it names packages that are missing and
leaves them out. The columns are those of `gradwire bench`. Whole arrays are encoded and decoded by
one thread into memory that the package allocates. zfp is lossy: its tolerance is a share of the
largest magnitude, which is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from gradwire.cli.output import print_table, significant
from gradwire_lab.bench_data import Floats, load_data


@dataclass(frozen=True)
class Row:
    """The results of one compressor. A GB/s is 10^9 bytes of float32 per second."""

    compressor: str
    bits_per_value: float
    ratio: float
    relative_error: float
    encode_gb_per_s: float
    decode_gb_per_s: float


def compressors() -> dict[str, Callable[[Any], tuple[Callable[..., Any], Callable[..., Any]]]]:
    """For each name, a function that takes the module and returns (encode, decode)."""
    return {
        "zstandard -1": lambda m: (
            m.ZstdCompressor(level=1).compress,
            m.ZstdDecompressor().decompress,
        ),
        "zstandard -3": lambda m: (
            m.ZstdCompressor(level=3).compress,
            m.ZstdDecompressor().decompress,
        ),
        "lz4.frame": lambda m: (m.compress, m.decompress),
        "snappy": lambda m: (m.compress, m.decompress),
        "zfpy 1e-2": lambda m: (lambda x: m.compress_numpy(x, tolerance=1e-2), m.decompress_numpy),
        "zfpy 1e-3": lambda m: (lambda x: m.compress_numpy(x, tolerance=1e-3), m.decompress_numpy),
    }


def measure(
    name: str,
    encode: Callable[..., Any],
    decode: Callable[..., Any],
    values: Floats,
    seconds: float,
) -> Row:
    given = values if name.startswith("zfpy") else values.tobytes()
    packed = encode(given)
    back = np.frombuffer(decode(packed), np.float32) if given is not values else decode(packed)
    error = float(np.linalg.norm(values - back) / np.linalg.norm(values))
    encoding = seconds_of(lambda: encode(given), seconds)
    decoding = seconds_of(lambda: decode(packed), seconds)
    bits = 8 * len(packed) / values.size
    return Row(
        name, bits, 32 / bits, error, values.nbytes / encoding / 1e9, values.nbytes / decoding / 1e9
    )


def seconds_of(call: Callable[[], object], seconds: float) -> float:
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=2_000_000, help="float32 values")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds for each measurement")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    data = load_data("auto", 0)
    values = np.resize(data.period, arguments.numel)
    rows, missing = [], []
    for name, make in compressors().items():
        package = name.split()[0]
        try:
            module = importlib.import_module(package)
        except ImportError:
            missing.append(package)
            continue
        rows.append(measure(name, *make(module), values, arguments.seconds))
    if arguments.json:
        print(
            json.dumps(
                {"data": data.description, "results": [asdict(row) for row in rows]}, indent=2
            )
        )
        return
    print(f"data  {data.description}")
    print_table(
        ("compressor", "bits/value", "ratio", "rel. error", "encode GB/s", "decode GB/s"),
        [(row.compressor, *map(significant, list(asdict(row).values())[1:])) for row in rows],
    )
    if missing:
        print(f"not installed: {', '.join(dict.fromkeys(missing))}")


if __name__ == "__main__":
    main()
