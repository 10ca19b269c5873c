"""Makes seeds for the fuzzers: python fuzz/make_corpus.py FOLDER.

They come from the golden files, from below, and from corpus/, which has what fuzzers found.

FOLDER gets a folder for each fuzzer. Files that are there already are kept, so that a corpus can
grow.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import zipfile
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"

# This bit pattern in a round trip's n makes the tensor long (fuzz/round_trip.cc).
LONG = 15 << 28
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


def write_deltas(apply: Path, round_trip: Path) -> None:
    """The golden deltas, and their arrays."""
    for folder in (apply, round_trip):
        folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(GOLDEN.glob("*/*.delta")):
        for name, choices in {"": b"\0\1", "-of-others-": b"\x81\x08"}.items():
            (apply / f"{path.parent.name}-{path.stem}{name}").write_bytes(
                choices + path.read_bytes()
            )
    elements = [0, 1, 2, 16, 17, 18]  # in the order of fuzz/round_trip_delta.cc
    for case in json.loads((GOLDEN / "index.json").read_text())["deltas"]:
        base, result = ((GOLDEN / case[key]).read_bytes() for key in ("base", "result"))
        length = min(len(base), len(result), 1024)
        arrays = base[:length] + result[:length]
        number = elements.index(case["element"])
        shortest = 126 // 6 * 6 + number  # nothing is added
        for name, flags, rows, n in (
            ("", shortest, 0, case["n"]),
            ("-sums", 132 + (number - 132) % 6, 100, case["n"]),
            ("-long", 132 + (number - 132) % 6, 9000, LONG | 131_073),
        ):
            choices = struct.pack("<BBHI", flags, 0, rows, n)
            (round_trip / f"{case['name']}{name}").write_bytes(choices + arrays)


# Texts with every codec and exchange, and with mistakes.
TEXTS = """\
3lc:s=1.75,coder=rice,bucket=500
3lc:s=nan,s=1
qsgd:bits=4,coder=elias,norm=l2
qsgd:levels=1000,coder=elias-dense
terngrad:clip=2.5,pack=trits5,coder=zre
topk:ratio=0.01,index=rice,values=bf16
stc:density=0.01
topk2bit:density=0.02
inceptionn:bound=10,mode=strict
truncate:bits=16,ef=on
int8:bucket=256,residual=bf16
raw:ef=on
auto:bits=0.5,every=50
auto:error=0.1,residual=bf16
ring:
hierarchical:between=ring,within=ring,ranks=4
hierarchical:within_codec=int8:ef=off
hierarchical:ranks=0
hierarchical:ranks=32767
hierarchical:ranks=65536
"""


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(TEXTS.splitlines()):
        (folder / f"text-{number}").write_bytes(text.encode())


def write_tensor_files(folder: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }".ljust(117) + "\n"
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(24)
    (folder / "small.npy").write_bytes(npy)
    header = (
        '{"__metadata__":{"step":"7"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        '"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}'
    )
    tensors = struct.pack("<Q", len(header)) + header.encode() + bytes(range(14))
    (folder / "small.safetensors").write_bytes(tensors)


def write_choices(folder: Path, first: int, second: int) -> None:
    """Random courses, one for each value of the first two choices."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(first * second):
        course = random.Random(seed).randbytes(600)
        (folder / f"random-{seed}").write_bytes(bytes(divmod(seed, second)) + course)


def unpack(folder: Path) -> None:
    for path in sorted(CORPUS.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder / path.stem)


def main() -> None:
    folder = Path(sys.argv[1])
    copy_all("*/*.frame", folder / "decode_frame")
    copy_all("*/*.packet", folder / "decode_packet")
    write_round_trips(folder / "round_trip")
    write_deltas(folder / "apply_delta", folder / "round_trip_delta")
    copy_all("*/*.container", folder / "tensor_files")
    write_tensor_files(folder / "tensor_files")
    write_texts(folder / "texts")
    write_choices(folder / "exchange_messages", 20, 21)  # exchanges, codecs
    write_choices(folder / "c_api", 20, 2)  # functions
    unpack(folder)


if __name__ == "__main__":
    main()
