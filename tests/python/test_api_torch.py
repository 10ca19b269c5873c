"""PyTorch tensors are arrays like any other. The tests are skipped without PyTorch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradwire

torch = pytest.importorskip("torch")


def test_a_tensor_is_an_array() -> None:
    x = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    frame = gradwire.encode(x, "3lc:s=1.25")
    assert gradwire.encode(torch.from_numpy(x), "3lc:s=1.25") == frame
    out = torch.zeros(60)
    gradwire.decode_into(frame, out)
    gradwire.decode_into(frame, out, accumulate=True)
    assert torch.equal(out, torch.from_numpy(2 * gradwire.decode(frame)))


def test_tensors_it_cannot_take_are_refused() -> None:
    x = torch.ones(6, 10)
    for wrong, message in [
        (x.t(), "contiguous"),
        (x.double(), "float64"),
        (x.int(), "int32"),
    ]:
        with pytest.raises(gradwire.GradwireError, match=message):
            gradwire.encode(wrong, "3lc")


def test_a_parameter_need_not_be_detached() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    assert gradwire.encode(parameter, "raw") == gradwire.encode(np.ones(10, "f4"), "raw")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_16_bit_tensors_are_encoded_as_the_float32_they_equal(name: str) -> None:
    torch.manual_seed(1)
    for numel in (0, 1, 4097, 90_000):
        x = torch.randn(numel).to(getattr(torch, name))
        for codec in [entry["name"] for entry in gradwire.codecs()]:
            frame = gradwire.encode(x, codec, seed=1)
            assert gradwire.inspect(frame)["dtype"] == name
            wide = gradwire.encode(x.float(), codec, seed=1)
            assert gradwire.decode(frame).tobytes() == gradwire.decode(wide).tobytes(), codec
            if codec == "raw":
                assert len(frame) == 32 + 2 * numel
            else:
                assert frame[32:] == wide[32:]


def test_the_residual_of_a_16_bit_tensor_is_float32() -> None:
    x = torch.randn(50_000).bfloat16()
    narrow, wide = (gradwire.Compressor("3lc:s=1.75", x.numel()) for _ in range(2))
    for step in range(3):
        assert narrow.encode(x, step)[32:] == wide.encode(x.float(), step)[32:]
    assert narrow.residual is not None
    assert wide.residual is not None
    assert narrow.residual.tobytes() == wide.residual.tobytes()


def test_nan_in_a_16_bit_tensor_is_named() -> None:
    x = torch.zeros(100, dtype=torch.float16)
    x[7] = torch.nan
    with pytest.warns(gradwire.NonFiniteWarning, match="element 7 is NaN"):
        gradwire.encode(x, "3lc")


# What is said of each kind of bad_tensors.py whose memory does not hold its values.
NO_MEMORY = "has no memory with its values; pass a plain tensor"
FREED = "reach beyond its memory of [0-9]+ bytes, which was freed"
NEGATIVE = "the negatives of those in its memory.*resolve_neg"
STRIDED = "contiguous"
ANSWERS = {
    "good": "taken|it does not start with|a delta begins with",
    "good, a part": "taken|it does not start with|a delta begins with",
    "good, the last part": "taken|it does not start with|a delta begins with",
    "fake": NO_MEMORY,
    "fake, behind the beginning": NO_MEMORY,
    "freed": FREED,
    "freed, behind the beginning": FREED,
    "half freed": FREED,
    "one byte short": FREED,
    "freed, in 16 bits": FREED + "|got dtype bfloat16",
    "freed, of DLPack": FREED,
    "on meta": NO_MEMORY,
    "negative": NEGATIVE,
    "imaginary part": NEGATIVE,
    "conjugate": "got dtype complex64",
    "zeros without memory": NO_MEMORY,
    "functional": NO_MEMORY,
    "in vmap": NO_MEMORY,
    "in grad": NO_MEMORY,
    "of two tensors": NO_MEMORY,
    "not yet initialised": NO_MEMORY,
    "sparse": NO_MEMORY,
    "nested": "gives no access to values in CPU memory",
    "jagged": NO_MEMORY,
    "quantized": "got dtype torch.quint8",
    "for MKL-DNN": NO_MEMORY,
    "expanded": STRIDED,
    "backwards": STRIDED,
}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, str] | str]:
    """What every function that takes arrays says to every kind; in processes, which a fault may
    end."""
    script = Path(__file__).with_name("bad_tensors.py")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    found = dict(json.loads(line) for line in run.stdout.splitlines())
    assert found.keys() == ANSWERS.keys()
    return found


@pytest.mark.parametrize("kind", ANSWERS)
def test_memory_without_a_tensors_values_is_refused_by_all_that_take_arrays(
    kind: str, answers: dict[str, dict[str, str] | str]
) -> None:
    by_door = answers[kind]
    assert isinstance(by_door, dict), by_door
    for door, answer in by_door.items():
        assert re.search(ANSWERS[kind], answer), (door, answer)


def test_every_function_that_takes_arrays_is_tried(
    answers: dict[str, dict[str, str] | str],
) -> None:
    stub = Path(gradwire.__file__).with_name("_core.pyi").read_text()
    parameters = re.findall(r"(\w+): _Array", stub)
    parameters.remove("frame")  # decode has two signatures
    tried = [door.split()[-1] for door in answers["good"] if door != RESIDUAL]
    assert sorted(tried) == sorted(parameters)


RESIDUAL = "Compressor.load_state_dict residual"  # in a dictionary, so the stub does not name it
