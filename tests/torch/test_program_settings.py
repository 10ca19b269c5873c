"""What a program sets for its own tensors changes nothing in those of gradwire."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import gradwire
import program_jobs
from cluster import Cluster
from gradwire.contrib.qsvrg import QSVRG
from ways import WAYS

PACKAGE = Path(gradwire.__file__).parent
# Functions that make a tensor of the default dtype, or on the default device.
FACTORIES = {function.__name__ for function in _device_constructors()}
# They follow a default, and have no argument against it.
FORBIDDEN = {
    *("Tensor", "FloatTensor", "get_default_dtype", "get_default_device"),
    *("no_grad", "set_grad_enabled"),  # gradwire/torch/parameters.py has more than these
}
# The second begins a thread, which has no mode of the program's.
ALLOWED = {"modes.py", "thread.py"}


# The exchanges of these differ in C++ alone, or in where a server is.
ALIKE = ("hook, ring", "hook, broadcast", "hook, terngrad", "hook, hierarchical", "servers, two")


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ALIKE])
def test_no_setting_of_the_program_changes_a_bit(cluster: Cluster, way: str) -> None:
    world = WAYS[way].ranks[0]
    for found in cluster.run(world, program_jobs.train_under_each, way):
        assert found == dict.fromkeys(found, found["none"])


def faults_of(source: str) -> Iterator[str]:
    """The calls of functions of torch that follow a default of the program."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        function = node.func
        if not isinstance(function.value, ast.Name) or function.value.id != "torch":
            continue
        given = {keyword.arg for keyword in node.keywords}
        if function.attr in FACTORIES and not {"dtype", "device"} <= given:
            yield f"line {node.lineno}: torch.{function.attr} needs dtype= and device="
        elif function.attr == "Generator" and "device" not in given:
            yield f"line {node.lineno}: torch.Generator needs device="
        elif function.attr in FORBIDDEN:
            yield f"line {node.lineno}: torch.{function.attr} follows the program"


def test_no_tensor_follows_a_default() -> None:
    found = []
    for path in (path for part in ("torch", "contrib") for path in (PACKAGE / part).rglob("*.py")):
        if path.name not in ALLOWED:
            found += [f"{path.relative_to(PACKAGE)}, {f}" for f in faults_of(path.read_text())]
    assert not found
    assert list(faults_of("torch.zeros(3, dtype=torch.int8)")) == [
        "line 1: torch.zeros needs dtype= and device="
    ]
    assert len(list(faults_of("torch.Generator(); torch.no_grad()"))) == 2


def test_parameters_of_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"parameter 0 was made inside torch.inference_mode\(\)"):
        QSVRG([weight], lambda j: weight.sum(), 2, smoothness=1.0, convexity=1.0)
