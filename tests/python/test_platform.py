"""cmake/platform.cmake refuses processors for which gradwire can't be built, in plain words."""

import subprocess
from pathlib import Path

import pytest

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
