"""Checks the gradwire that is installed in the environment of the interpreter that runs this, which
must have neither PyTorch nor the source tree: each codec, the command, the types, the manual pages.

Usage: PYTHON -P scripts/check_package.py [--highway VERSION] [--lab]
  --highway VERSION   the Highway that must be linked in
  --lab               gradwire-lab must be there, too; without the option it must not"""

import argparse
import contextlib
import importlib.metadata
import importlib.resources
import importlib.util
import io
import sys
import sysconfig
from pathlib import Path

import numpy as np

import gradwire
from gradwire._core import build_info


def run(*arguments: str) -> int:
    """The exit status of the command."""
    [command] = importlib.metadata.entry_points(group="console_scripts", name="gradwire")
    sys.argv = ["gradwire", *arguments]
    try:
        command.load()()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


parser = argparse.ArgumentParser()
parser.add_argument("--highway")
parser.add_argument("--lab", action="store_true")
options = parser.parse_args()
assert importlib.util.find_spec("torch") is None, "this environment has PyTorch"
files = importlib.metadata.files("gradwire") or []
assert any(file.locate() == Path(gradwire.__file__) for file in files), gradwire.__file__
assert gradwire.__version__ == importlib.metadata.version("gradwire")
for name in "py.typed", "_core.pyi":
    assert importlib.resources.files("gradwire").joinpath(name).is_file(), name
assert any(file.name == "gradwire-codecs.1" for file in files), "no manual pages"
assert not any(file.match("include/gradwire/*") for file in files), "headers in the wheel"
if options.highway is not None:
    assert build_info()["highway"] == options.highway, build_info()

x = np.array([1, 0, -1], np.float32)
for codec in gradwire.codecs():
    frames = set()
    for target in gradwire.simd_targets():
        frame = gradwire.encode(x, codec["name"], target=target)
        assert gradwire.decode(frame, target=target).shape == x.shape, (codec["name"], target)
        frames.add(frame)
    assert len(frames) == 1, codec["name"]
assert np.array_equal(gradwire.decode(gradwire.encode(x, "3lc:s=1")), x)
assert run("codecs", "--json") == 0
said = io.StringIO()
with contextlib.redirect_stderr(said):
    status = run(
        *("simulate", "--values", "1000", "--bandwidth", "none"),
        *("--codec-time", "none", "--data", "synthetic"),
    )
if options.lab:
    assert status == 0, said.getvalue()
    lab = importlib.metadata.files("gradwire-lab") or []
    assert any(file.name == "gradwire-train.1" for file in lab), "no manual pages of the lab"
else:
    assert status == 1, status
    assert "gradwire-lab not installed" in said.getvalue(), said.getvalue()
print(sysconfig.get_platform(), sys.version.split()[0], *gradwire.simd_targets())
