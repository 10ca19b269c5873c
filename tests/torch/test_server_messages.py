"""What workers and servers read in a message: its own content, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire._core import Layout
from gradwire.torch.network.transport import Bytes
from gradwire.torch.server.buffers import ModelBuffers
from gradwire.torch.server.group_options import (
    apply_options,
    encode_options,
    read_options,
    read_version,
    version_message,
)
from gradwire.torch.server.model_parts import WorkerPart
from gradwire.torch.server.server_plan import ServerPlan
from gradwire.torch.server.server_settings import ServerSettings
from gradwire.torch.staging.stage import Stage

WORKER, SERVER = 0, 2


def as_bytes(message: bytes) -> Bytes:
    return np.frombuffer(bytearray(message), dtype=np.uint8)


def make_groups() -> list[dict[str, Any]]:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)]
    return torch.optim.Adam(groups, amsgrad=True).param_groups


def make_part() -> tuple[WorkerPart, list[nn.Parameter]]:
    layout = Layout([("weight", [8, 8]), ("bias", [5])], 3, "3lc", servers=1)
    tensors = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(5))]
    named = list(zip(("weight", "bias"), tensors, strict=True))
    plan = ServerPlan(ServerSettings(), named, layout, [(layout, named)], None, Stage())
    return WorkerPart(0, (layout, named), WORKER, plan), tensors


@pytest.mark.parametrize("size", [0, 7, 9, 12, 8 + 4 * 69 - 4, 8 + 4 * 69 - 1, 8 + 4 * 69 + 4])
def test_a_model_of_another_size_changes_nothing(size: int) -> None:
    part, tensors = make_part()
    with pytest.raises(ValueError, match=f"it has {size} bytes; .* have 284, the version alone 8"):
        part.load_model(SERVER, as_bytes(bytes(size)))
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_a_model_is_read() -> None:
    part, tensors = make_part()
    values = np.arange(69, dtype=np.float32)
    assert part.load_model(SERVER, as_bytes((7).to_bytes(8, "little") + values.tobytes())) == 7
    assert torch.equal(torch.cat([t.detach().view(-1) for t in tensors]), torch.from_numpy(values))
    assert part.load_model(SERVER, as_bytes((8).to_bytes(8, "little"))) == 8


@pytest.mark.parametrize("size", [0, 11, 13, 19, 21])
def test_buffers_of_another_size_change_nothing(size: int) -> None:
    model = nn.BatchNorm1d(3, track_running_stats=False)
    model.register_buffer("seen", torch.ones(5))
    buffers = ModelBuffers(model, 0, SERVER, 1)
    with pytest.raises(ValueError, match=f"it has {size} bytes, and the model's buffers 20"):
        buffers.load(as_bytes(bytes(size)))
    assert bool((model.get_buffer("seen") == 1).all())


WRONG_OPTIONS = {
    "nothing": (b"", "no options of parameter groups as JSON"),
    "no JSON": (b"junk", "no options of parameter groups as JSON"),
    "no UTF-8": (b"\xff{", "no options of parameter groups as JSON"),
    "a number": (b"7", r"as JSON \(no list of groups\)"),
    "a list of numbers": (b"[1, 2]", r"as JSON \(no list of groups\)"),
    "an object in a group": (b'[{"lr": {}}, {}]', r"as JSON \(dict is not sent\)"),
    "depth": (b"[" * 100_000, "no options of parameter groups as JSON"),
    "fewer groups": (b"[{}]", "options of 1 parameter groups, not 2"),
    "more groups": (b"[{}, {}, {}]", "options of 3 parameter groups, not 2"),
    "a text for a number": (b'[{}, {"lr": "x"}]', "it says that lr of group 1 is 'x'"),
    "nothing for a number": (b'[{"lr": null}, {}]', "it says that lr of group 0 is None"),
    "a number for a pair": (b'[{"betas": 0.9}, {}]', "it says that betas of group 0 is 0.9"),
    "three for a pair": (b'[{"betas": [1, 1, 1]}, {}]', "betas of group 0 is"),
    "a text in a pair": (b'[{"betas": [0.9, "x"]}, {}]', "betas of group 0 is"),
    "a number for a truth value": (b'[{"amsgrad": 0.5}, {}]', "amsgrad of group 0 is 0.5"),
    "parameters": (b'[{"params": []}, {}]', "it says that params of group 0 is"),
    "their names": (b'[{"param_names": []}, {}]', "it says that param_names of group 0 is"),
}


@pytest.mark.parametrize(("text", "error"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_options_of_other_content_are_refused(text: bytes, error: str) -> None:
    message = version_message(3, text)
    assert read_version(message) == 3
    with pytest.raises(ValueError, match=error):
        read_options(message, make_groups())


@pytest.mark.parametrize("size", range(8))
def test_a_message_without_a_whole_version_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"it has {size} bytes, and begins with a version of 8"):
        read_version(as_bytes(bytes(size)))


def test_options_that_schedulers_set_are_taken() -> None:
    ours, theirs = make_groups(), make_groups()
    for group in theirs:
        group |= {"lr": torch.tensor(0.5), "betas": (0.5, 0.75), "amsgrad": False, "foreach": True}
        group |= {"initial_lr": 0.25, "weight_decay": 1, "eps": np.float32(0.125)}
    theirs[0]["lr"] = torch.tensor([0.5])
    ours[0]["lr"] = torch.tensor([1.0])
    apply_options(ours, read_options(version_message(0, encode_options(theirs)), ours))
    assert ours[1]["betas"] == (0.5, 0.75)
    assert (float(ours[0]["lr"]), ours[1]["eps"]) == (0.5, 0.125)
    assert (ours[1]["lr"], ours[1]["amsgrad"], ours[1]["initial_lr"]) == (0.5, False, 0.25)
    changed = as_bytes(bytes(8) + b'[{"order": [3]}]')
    read_options(changed, [{"lr": torch.tensor(0.1), "order": [1, 2], "kind": "a"}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("lr", "betas", "x")), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.builds(lambda v: bytes(8) + json.dumps(v).encode(), JSON))
def test_any_bytes_are_read_or_refused_with_a_value_error(content: bytes) -> None:
    groups, message = make_groups(), as_bytes(content)
    try:
        read_version(message)
        options = read_options(message, groups)
    except ValueError:
        return
    apply_options(groups, options)
    assert all(isinstance(group["lr"], int | float) for group in groups)
    assert all(len(group["betas"]) == 2 for group in groups)
    assert all(len(group["params"]) == 1 for group in groups)
