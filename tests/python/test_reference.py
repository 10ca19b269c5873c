"""gradwire against the plain Python reference: random tensors, and frames broken in many ways."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradwire
from golden import array, common, encoder, payloads, spec
from payloads import ternary
from payloads.three_lc import NUMBER as THREE_LC

pytestmark = pytest.mark.filterwarnings("ignore::gradwire.NonFiniteWarning")
settings.register_profile("differential", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("differential")

MAX_NUMEL = 2**16  # larger claims are refused by both sides alike


def sparsity_text(bits: int) -> str:
    """The text of a float32 in [1, 2) from its 23 fraction bits."""
    return repr(float(np.uint32(0x3F800000 | bits).view(np.float32)))


sparsities = st.one_of(
    st.sampled_from(["1", "1.5", "1.75", "1.9"]), st.integers(0, 2**23 - 1).map(sparsity_text)
)
buckets = st.one_of(st.just(0), st.integers(1, 30).map(lambda k: 5 * k))


@st.composite
def three_lc(draw: st.DrawFn) -> str:
    text = f"3lc:s={draw(sparsities)},coder={draw(st.sampled_from(['zre', 'none', 'rice']))}"
    bucket = draw(buckets)
    return text + (f",bucket={bucket}" if bucket else "")


@st.composite
def qsgd(draw: st.DrawFn) -> str:
    levels = draw(st.one_of(st.sampled_from([1, 7, 127, 128]), st.integers(1, 8191)))
    bucket = 8 * draw(st.one_of(st.just(64), st.integers(1, 30)))
    norm = draw(st.sampled_from(["max", "l2"]))
    coder = draw(st.sampled_from(["fixed", "elias", "elias-dense"]))
    return f"qsgd:levels={levels},bucket={bucket},norm={norm},coder={coder}"


def takes_feedback(codec: str) -> bool:
    try:
        gradwire.Compressor(codec, 0)
    except gradwire.GradwireError:
        return False
    return True


drawn = [
    "stoch3",
    "stoch3:coder=zre,bucket=320",
    "stoch3:coder=rice",
    "terngrad",
    "terngrad:clip=0.5,bucket=320",
    "terngrad:pack=trits5",
    "terngrad:clip=0,pack=trits5,coder=zre",
]
leveled = ["int8", "int8:bucket=7", "onebit", "onebit:bucket=8"]
sparse = [
    "topk:ratio=0.3",
    "topk:ratio=0.1,values=bf16",
    "topk:index=rice",
    "topk:ratio=1,index=rice",
    "stc:density=0.2",
    "stc:coder=zre",
    "topk2bit:density=0.3",
]
clipped = ["inceptionn", "inceptionn:bound=8", "inceptionn:bound=6", "inceptionn:mode=strict"]
codecs = st.one_of(
    st.sampled_from(["raw", "bf16", "fp16"]),
    st.sampled_from(drawn + leveled + sparse + clipped),
    three_lc(),
    three_lc(),
    qsgd(),
)
finite = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1, 1, width=32),
    st.sampled_from(
        [0.0, -0.0, 0.5, -1.0, 2.0**-149, -(2.0**-126), common.FLT_MAX, -common.FLT_MAX]
    ),
)


class Run(NamedTuple):
    """Some values, then zeros."""

    values: list[float]
    zeros: int


def tensors(elements: st.SearchStrategy[float]) -> st.SearchStrategy[bytes]:
    """Runs of values between runs of zeros, long enough for every code."""
    runs = st.builds(Run, st.lists(elements, max_size=12), st.integers(0, 100))
    flat = st.lists(runs, max_size=6).map(
        lambda parts: [x for part in parts for x in part.values + [0.0] * part.zeros]
    )
    return flat.map(common.to_bytes)


any_float = st.one_of(finite, finite, finite, st.floats(width=32))
targets = st.sampled_from(gradwire.simd_targets())


@given(tensor=st.one_of(tensors(finite), tensors(any_float)), codec=codecs, target=targets)
def test_encode_and_decode(tensor: bytes, codec: str, target: str) -> None:
    frame = gradwire.encode(array(tensor), codec, target=target)
    assert frame == encoder.encode_frame(tensor, codec)
    assert gradwire.decode(frame, target=target).tobytes() == spec.decode_frame(frame)


@pytest.mark.parametrize("n", [40955, 40959, 40960, 40961, 81920, 81921])
@pytest.mark.parametrize(
    "codec",
    [
        "3lc:s=1.75",
        "3lc:coder=none",
        "3lc:s=1.9,bucket=4100",
        "3lc:coder=rice,bucket=4100",
        "qsgd:bits=3,bucket=4096,norm=l2",
        "qsgd:bits=2,coder=elias",
        "qsgd:bits=8,coder=elias-dense",
        "qsgd:levels=200,norm=l2,coder=elias-dense",
        "int8:bucket=4100",
        "onebit",
        "onebit:bucket=50000",
        "terngrad",
        "terngrad:pack=trits5,coder=rice,bucket=6400",
        "stoch3:coder=zre",
        "topk",
        "topk:index=rice,values=bf16",
        "topk2bit",
        "stc",
        "inceptionn",
        "inceptionn:bound=8,mode=strict",
        "truncate:bits=22",
        "truncate:bits=24,ef=on",
    ],
)
def test_several_chunks(codec: str, n: int) -> None:
    x = (np.random.default_rng(n).standard_normal(n) ** 3).astype(np.float32)
    frame = encoder.encode_frame(x.tobytes(), codec)
    assert gradwire.encode(x, codec, threads=2) == frame
    assert gradwire.decode(frame, threads=2).tobytes() == spec.decode_frame(frame)


def three_tensors(draw: st.DrawFn) -> list[bytes]:
    n = draw(st.integers(0, 90))
    return [
        common.to_bytes(draw(st.lists(any_float if step else finite, min_size=n, max_size=n)))
        for step in range(3)
    ]


@given(
    steps=st.composite(three_tensors)(),
    codec=st.one_of(
        three_lc(),
        qsgd().map(lambda text: text + ",ef=on").filter(takes_feedback),
        st.sampled_from(["bf16:ef=on", "fp16:ef=on", "int8:bucket=9", "onebit:bucket=16"]),
        st.sampled_from(
            [
                "topk:ratio=0.2",
                "topk:values=bf16",
                "topk2bit:density=0.3",
                "stc:density=0.2",
                "inceptionn:ef=on",
                "truncate:bits=22,ef=on",
            ]
        ),
    ),
    half=st.booleans(),
    target=targets,
)
def test_residuals_over_steps(steps: list[bytes], codec: str, half: bool, target: str) -> None:
    codec += ",residual=bf16" if half else ""
    n = len(steps[0]) // 4
    compressor = gradwire.Compressor(codec, n, target=target)
    residual = bytes(4 * n)
    for step, tensor in enumerate(steps):
        draws = common.Draws(step=step)
        expected, residual = encoder.encode_with_residual(tensor, codec, residual, draws)
        assert compressor.encode(array(tensor), step=step) == expected
        assert compressor.residual is not None
        assert compressor.residual.tobytes() == residual


@given(
    seed=st.integers(0, 2**64 - 1), stream=st.integers(0, 2**64 - 1), step=st.integers(0, 2**64 - 1)
)
def test_draws(seed: int, stream: int, step: int) -> None:
    tensor = np.linspace(-1, 1, 67, dtype=np.float32)
    draws = common.Draws(seed, stream, step)
    for codec in drawn:
        frame = gradwire.encode(tensor, codec, seed=seed, stream=stream, step=step)
        assert frame == encoder.encode_frame(tensor.tobytes(), codec, draws)


class Outcome(NamedTuple):
    """The result of a decoder: the status, and the values if it is ok."""

    status: str
    values: bytes = b""


def reference_outcome(frame: bytes) -> Outcome:
    try:
        return Outcome("ok", spec.decode_frame(frame, MAX_NUMEL))
    except common.FormatError as error:
        return Outcome(error.status)


def gradwire_outcome(frame: bytes, target: str, threads: int = 1) -> Outcome:
    try:
        values = gradwire.decode(frame, target=target, threads=threads, max_numel=MAX_NUMEL)
    except gradwire.GradwireError as error:
        return Outcome(error.code)
    return Outcome("ok", values.tobytes())


def check_all_targets(frame: bytes) -> None:
    expected = reference_outcome(frame)
    for target in gradwire.simd_targets():
        assert gradwire_outcome(frame, target) == expected, target


def resealed(frame: bytes) -> bytes:
    """The frame with a correct payload length and checksum, so that later checks are reached."""
    if len(frame) < spec.HEADER_SIZE:
        return frame
    after = struct.pack("<Q", len(frame) - spec.HEADER_SIZE) + frame[spec.HEADER_SIZE :]
    return frame[:20] + struct.pack("<I", spec.checksum(frame[:20], after)) + after


def mutate(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes changed, removed or inserted."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        match draw(st.sampled_from(["flip", "set", "remove", "insert", "cut"])):
            case "flip":
                changed[at : at + 1] = bytes(
                    byte ^ 1 << draw(st.integers(0, 7)) for byte in changed[at : at + 1]
                )
            case "set":
                changed[at : at + 1] = bytes([draw(st.sampled_from([0, 1, 121, 243, 255]))])
            case "remove":
                del changed[at]
            case "insert":
                changed.insert(at, draw(st.integers(0, 255)))
            case "cut":
                del changed[at:]
        if not changed:
            break
    return bytes(changed)


@st.composite
def broken_frames(draw: st.DrawFn) -> bytes:
    frame = encoder.encode_frame(draw(tensors(any_float)), draw(codecs))
    broken = mutate(draw, frame)
    return resealed(broken) if draw(st.integers(0, 3)) else broken


# Of the header of a frame: offset and bytes of each field but the checksum.
FIELDS = [(0, 2), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (8, 8), (16, 4), (24, 8)]
FIELD_VALUES = [0, 1, 2, 3, 4, 5, 8, 255, 2**16 - 1, 2**32, 2**40, 2**40 + 1, 2**63, 2**64 - 1]


@st.composite
def frames_with_several_faults(draw: st.DrawFn) -> bytes:
    """Up to three wrong fields, and bytes too few or too many: the order of the checks counts."""
    frame = bytearray(encoder.encode_frame(common.to_bytes([1.0, -2.0] * 9), draw(codecs)))
    for offset, size in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        value = draw(st.sampled_from(FIELD_VALUES)) % 256**size
        frame[offset : offset + size] = value.to_bytes(size, "little")
    data = bytes(frame) + bytes(draw(st.sampled_from([0, 0, 1])))
    data = data[: len(data) - draw(st.sampled_from([0, 0, 1, 40]))]
    if len(data) < spec.HEADER_SIZE or draw(st.integers(0, 3)) == 0:
        return data
    checksum = struct.pack("<I", spec.checksum(data[:20], data[24:]))
    return data[:20] + checksum + data[24:]


@settings(max_examples=400)
@given(frame=frames_with_several_faults())
def test_frames_with_several_faults(frame: bytes) -> None:
    check_all_targets(frame)


@settings(max_examples=600)
@given(frame=broken_frames())
def test_broken_frames(frame: bytes) -> None:
    check_all_targets(frame)


@st.composite
def made_up_payloads(draw: st.DrawFn) -> bytes:
    """A well-formed 3lc frame around random codes."""
    bucket = draw(st.sampled_from([0, 0, 5, 10]))
    coder = draw(st.sampled_from([ternary.NONE, ternary.ZRE, ternary.ZRE]))
    codes = draw(st.lists(st.one_of(st.integers(0, 255), st.just(121)), max_size=12))
    packed = sum(code - 241 if code > 242 and coder == ternary.ZRE else 1 for code in codes)
    n = max(5 * packed - draw(st.integers(0, 4)), 0) + draw(st.sampled_from([0, 0, 0, 1]))
    count = common.ceil_div(n, bucket) if bucket else 1
    scales = draw(
        st.lists(
            st.sampled_from([1.0, 0.0, 2.0**-149, common.FLT_MAX, -0.0]),
            min_size=count,
            max_size=count,
        )
    )
    payload = common.to_bytes(scales) + bytes(codes)
    return encoder.seal_frame(THREE_LC, coder, bucket, n, payload)


@settings(max_examples=500)
@given(frame=made_up_payloads())
def test_made_up_payloads(frame: bytes) -> None:
    check_all_targets(frame)


def two_chunk_frame() -> bytes:
    x: npt.NDArray[np.float32] = np.random.default_rng(5).standard_normal(41000, np.float32) ** 3
    return encoder.encode_frame(x.tobytes(), "3lc:s=1.75")


TWO_CHUNKS = two_chunk_frame()


@settings(max_examples=60)
@given(data=st.data())
def test_broken_sizes_and_chunks(data: st.DataObject) -> None:
    front = data.draw(st.booleans(), label="in the scale or sizes")
    last = 40 if front else len(TWO_CHUNKS) - 1
    at = data.draw(st.integers(32, last), label="at")
    byte = data.draw(st.integers(0, 255), label="byte")
    frame = resealed(TWO_CHUNKS[:at] + bytes([byte]) + TWO_CHUNKS[at + 1 :])
    expected = reference_outcome(frame)
    for target in gradwire.simd_targets():
        assert gradwire_outcome(frame, target, threads=2) == expected, target


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 4)) == 0:
        report = spec.NonFiniteReport(*draw(st.tuples(*[st.integers(0, 2**32 - 1)] * 3)))
        return encoder.encode_packet(spec.Packet(spec.PULL, 1, 2, 3, (), report))
    texts = draw(st.lists(st.tuples(tensors(finite), codecs), max_size=4))
    frames = tuple(spec.parse_frame(encoder.encode_frame(*text)) for text in texts)
    return encoder.encode_packet(spec.Packet(spec.PUSH, 9, 2**40, 2**63, frames))


def packet_status(data: bytes) -> str:
    try:
        packet = spec.parse_packet(data)
        for frame in packet.frames:
            codec = payloads.CODECS[frame.codec]
            if codec.NAME == "inceptionn":  # inspect counts the classes of its values
                codec.decode(frame)
    except common.FormatError as error:
        return error.status
    return "ok"


def inspect_status(data: bytes) -> str:
    try:
        gradwire.inspect(data)
    except gradwire.GradwireError as error:
        return str(error.code)
    return "ok"


@given(data=packets())
def test_packets(data: bytes) -> None:
    packet = spec.parse_packet(data)
    told = gradwire.inspect(data)
    assert [told["source"], told["step"]] == [packet.source, packet.step]
    assert [
        (frame["codec"].partition(":")[0], frame["numel"], frame["payload_bytes"])
        for frame in told["frames"]
    ] == [(payloads.CODECS[f.codec].NAME, f.n, len(f.payload)) for f in packet.frames]


@st.composite
def broken_packets(draw: st.DrawFn) -> bytes:
    broken = b"GP" + mutate(draw, draw(packets())[2:])
    if len(broken) < spec.HEADER_SIZE or draw(st.integers(0, 3)) == 0:
        return broken
    checksum = struct.pack("<I", spec.checksum(broken[:28], broken[32:]))
    return broken[:28] + checksum + broken[32:]


@settings(max_examples=600)
@given(data=broken_packets())
@example(data=b"GP")
def test_broken_packets(data: bytes) -> None:
    assert inspect_status(data) == packet_status(data)
