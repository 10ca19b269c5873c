"""Makes seeds for the fuzzers from the golden files: python fuzz/make_corpus.py FOLDER.

FOLDER gets a folder for each fuzzer. Files that are there already are kept, so that a corpus can
grow.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"

# This bit pattern in a round trip's n makes the tensor long (fuzz/round_trip.cc).
LONG = 3 << 30
# The first byte of a round trip's choices: codec and coder, groups, residual (fuzz/round_trip.cc).
THREE_LC = {
    "3lc": 5,
    "3lc-f32": 5 | 2 << 5,
    "3lc-bf16": 5 | 1 << 5,
    "3lc-none-f32": 5 | 8 | 2 << 5,
    "3lc-bucket-f32": 5 | 16 | 2 << 5,
}
# With these choices the inputs use the codecs of the list there in turn, with each type of
# residual.
BY_NUMBER = {"any": 0, "any-bf16": 1 << 5, "any-f32": 2 << 5}


def copy_all(pattern: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(GOLDEN.glob(pattern)):
        (folder / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())


def write_round_trips(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(GOLDEN.glob("encode/*.f32"))):
        values = path.read_bytes()[:1024]
        residual = values[4:] + values[:4]
        lengths = [len(values) // 4]
        if path.stem == "gradient":
            lengths.append(LONG | 40961)
        seeds = [(name, choice, 192) for name, choice in THREE_LC.items()]
        seeds += [(name, choice, number % 256) for name, choice in BY_NUMBER.items()]
        for name, choice, second in seeds:
            for n in lengths:
                choices = struct.pack("<BBHI", choice, second, 6, n)
                (folder / f"{path.stem}-{name}-{n}").write_bytes(choices + values + residual)


def main() -> None:
    folder = Path(sys.argv[1])
    copy_all("*/*.frame", folder / "decode_frame")
    copy_all("*/*.packet", folder / "decode_packet")
    write_round_trips(folder / "round_trip")


if __name__ == "__main__":
    main()
