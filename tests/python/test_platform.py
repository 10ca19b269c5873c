"""cmake/platform.cmake refuses processors for which gradwire can't be built, in plain words."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cmake" / "platform.cmake"


@pytest.mark.parametrize(
    ("size", "order", "said"),
    [
        ("8", "LITTLE_ENDIAN", ""),
        ("4", "LITTLE_ENDIAN", "needs a processor with 64-bit addresses"),
        ("8", "BIG_ENDIAN", "needs a little-endian processor; s390x is big-endian"),
    ],
)
def test_what_is_refused(size: str, order: str, said: str) -> None:
    given = {
        "CMAKE_SIZEOF_VOID_P": size,
        "CMAKE_CXX_BYTE_ORDER": order,
        "CMAKE_SYSTEM_PROCESSOR": "s390x",
    }
    definitions = [f"-D{name}={value}" for name, value in given.items()]
    command = ["cmake", *definitions, "-P", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (said == "")
    assert said in " ".join(done.stderr.split())
