"""The profile of a model of which only the size and the time of a step are known."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from gradwire.machine import describe_build, describe_machine, load_average
from gradwire_lab.bench import OPERATIONS, Case, Workload, measure
from gradwire_lab.bench_data import BenchData, load_data
from gradwire_lab.plan.predict import BUCKET_BYTES
from gradwire_lab.plan.profile import CodecSpeed, Layer, MessageCosts, Profile

_LAYERS = 8  # at least, if they are not tiny
_MOST_LAYERS = 1024
_LEAST_LAYER = 4096  # values
_WORKLOAD = 1 << 20  # values
_CODEC_SECONDS = 0.15  # for each codec and operation
_PROCESSES = 2  # whose messages are measured


def assume_profile(values: int, compute_seconds: float, codecs: Sequence[str]) -> Profile:
    """Measures the codecs here, on one thread, and messages, if PyTorch is installed.

    Assumes that the forward pass takes a third of the step, and that the gradients of equal layers
    come evenly in the rest. Raises GradwireError (an unknown codec), TensorFileError.
    """
    load, data = load_average(), load_data("auto", 0)
    speeds = {c: measure_speed(c, min(values, _WORKLOAD), _CODEC_SECONDS, data) for c in codecs}
    transport = MessageCosts()
    if find_spec("torch") is not None:
        from gradwire_lab.plan.measure import measure_transport

        transport = measure_transport(_PROCESSES, min(values, _WORKLOAD))
    forward = compute_seconds / 3
    return Profile(
        model="a model",
        workers=_PROCESSES,
        forward_seconds=forward,
        rest_seconds=0.0,
        layers=_equal_layers(values, compute_seconds - forward),
        codecs=speeds,
        transport=transport,
        how={
            "assumed": "a third of the step is the forward pass, in the rest the gradients of "
            "equal layers come evenly",
            "machine": describe_machine(),
            "load_average": load,
            "build": describe_build(),
            "data": data.description,
        },
    )


def _equal_layers(values: int, seconds: float) -> tuple[Layer, ...]:
    """As many as DDP has buckets, within limits."""
    count = min(max(4 * values // BUCKET_BYTES, _LAYERS), _MOST_LAYERS, values // _LEAST_LAYER)
    count = max(1, count)
    sizes = [values // count + (i < values % count) for i in range(count)]
    return tuple(Layer(f"layer{i}", (n, 1), seconds / count) for i, n in enumerate(sizes))


def measure_speed(codec: str, numel: int, seconds: float, data: BenchData) -> CodecSpeed:
    """seconds: how long each operation is measured."""
    work = Workload(codec, numel, data, 0)
    encode, decode = (
        measure(work, Case(codec, numel, operation, "auto", 1), seconds) for operation in OPERATIONS
    )
    return CodecSpeed(encode.seconds / numel, decode.seconds / numel, encode.bits_per_value)
