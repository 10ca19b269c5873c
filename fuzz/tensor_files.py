"""Reads any bytes as a container, as .npy and as .safetensors, and restores what they hold.

    python fuzz/tensor_files.py [OPTION OF LIBFUZZER]... FOLDER...    (needs atheris)

Whatever the bytes are, the readers give tensors or raise their own errors. A container that was
read is written again and read as the same tensors.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import zlib
from pathlib import Path

import gradwire
from gradwire.container import MAGIC, PREFIX, ContainerError, TensorFile, parse, serialize
from gradwire.tensor_files import TensorFileError, read_tensor_file, write_tensor_file

MOST_VALUES = 1 << 17


def check(data: bytes) -> None:
    """One input. Raises AssertionError, or what a reader lets through."""
    check_container(data)
    check_container(repair(data))
    check_file(data, ".npy")
    check_file(data, ".safetensors")


def require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def check_container(data: bytes) -> None:
    try:
        content = parse(data)
    except ContainerError as error:
        require(bool(error.code and str(error)), "a refusal without a reason")
        return
    written = b"".join(bytes(part) for part in serialize(content))
    require(parse(written) == content, "a container changes when it is written again")
    for tensor in content.tensors:
        if tensor.storage == "plain":
            continue
        with contextlib.suppress(ContainerError, gradwire.GradwireError):
            tensor.inspect_frame()
            gradwire.decode(tensor.data, max_numel=MOST_VALUES)
    with contextlib.suppress(TensorFileError), tempfile.TemporaryFile() as file:
        plain = tuple(t for t in content.tensors if t.storage == "plain")
        if content.kind == "safetensors" or plain:
            write_tensor_file(TensorFile(content.kind, plain, content.metadata), file)


def repair(data: bytes) -> bytes:
    """With the right magic, version, header size and checksum, so that the header is read."""
    if len(data) < PREFIX.size:
        return data
    _, _, flags, _, size = PREFIX.unpack_from(data)
    header = data[PREFIX.size :]
    size = min(size, len(header))
    prefix = PREFIX.pack(MAGIC, 1, flags, 0, size)
    crc = zlib.crc32(header[:size], zlib.crc32(prefix[8:16], zlib.crc32(prefix[:4])))
    return PREFIX.pack(MAGIC, 1, flags, crc, size) + header


def check_file(data: bytes, suffix: str) -> None:
    path = Path(tempfile.gettempdir()) / f"gradwire-fuzz-{os.getpid()}{suffix}"
    path.write_bytes(data)
    try:
        content = read_tensor_file(path)
    except TensorFileError as error:
        require(str(path) in str(error), "a refusal that does not name the file")
        return
    finally:
        path.unlink()
    written = b"".join(bytes(part) for part in serialize(content))
    require(parse(written) == content, "tensors change in a container")


def main() -> None:
    """Command line entry point."""
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
