"""What cmake/platform.cmake refuses, in plain words, and what cmake/cuda.cmake leaves out."""

import os
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "cmake" / "cuda.cmake"
SCRIPT = Path(__file__).parents[2] / "cmake" / "platform.cmake"


def configure(size: str, order: str) -> tuple[bool, str]:
    """Whether a build with these findings of CMake goes on, and what is said."""
    given = {
        "CMAKE_SIZEOF_VOID_P": size,
        "CMAKE_CXX_BYTE_ORDER": order,
        "CMAKE_SYSTEM_PROCESSOR": "s390x",
    }
    definitions = [f"-D{name}={value}" for name, value in given.items()]
    command = ["cmake", *definitions, "-P", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("size", "order", "said"),
    [
        ("4", "LITTLE_ENDIAN", "needs a processor with 64-bit addresses; this compiler makes code"),
        ("", "LITTLE_ENDIAN", "64-bit addresses; CMake could not find out how long those of s390x"),
        ("8", "BIG_ENDIAN", "needs a little-endian processor; s390x is big-endian"),
    ],
)
def test_what_is_refused(size: str, order: str, said: str) -> None:
    goes_on, errors = configure(size, order)
    assert not goes_on
    assert said in errors


def test_what_is_taken() -> None:
    assert configure("8", "LITTLE_ENDIAN") == (True, "")


def test_an_unknown_byte_order_is_said() -> None:
    goes_on, warnings = configure("8", "")
    assert goes_on  # the compiler knows
    assert "could not find out the byte order of s390x" in warnings
    assert "src/base/endian.h" in warnings
    assert (
        "static_assert(std::endian::native =="
        in (SCRIPT.parents[1] / "src" / "base" / "endian.h").read_text()
    )


def test_the_codecs_on_the_gpu_are_built_on_request_alone(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\necho release 13.0\n")
    nvcc.chmod(0o755)
    environment = {**os.environ, "CUDACXX": str(nvcc), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["cmake", "-P", str(CUDA)], capture_output=True, text=True, check=True, env=environment
    )
    assert "the codecs on the GPU are not built (-DGRADWIRE_CUDA=ON builds them)" in done.stdout
    assert not (tmp_path / "asked").exists()
