"""gradwire against the golden files, for every SIMD target and number of threads."""

from __future__ import annotations

import struct
import warnings

import numpy as np
import pytest

import gradwire
from golden import FOLDER, ROOT, Case, array, cases, delta, payloads, read, read_values, spec
from gradwire import _core, container

EXECUTIONS = [(target, threads) for target in gradwire.simd_targets() for threads in (1, 2)]
PLAIN = [case for case in cases("encode") if "residual_in" not in case]
FEEDBACK = [case for case in cases("encode") if "residual_in" in case]
FRAMES = [case for case in cases("decode") if "frame" in case]
PACKETS = [case for case in cases("decode") if "packet" in case]
CONTAINERS = [case for case in cases("decode") if "container" in case]


BYTES_PER_CODEC = 45_000  # of the folder, with the cases of packets and containers
FILES: tuple[str, ...] = (
    "frame",
    "packet",
    "container",
    "values",
    "data",
    "input",
    "residual_in",
    "residual_out",
)
FILES += ("delta", "base", "result")


def name_of(case: Case) -> str:
    return str(case["name"])


pytestmark = pytest.mark.filterwarnings("ignore::gradwire.NonFiniteWarning")


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_encode(case: Case) -> None:
    x = array(read_values(case["input"], case["n"]))
    expected = read(case["frame"])
    for target, threads in EXECUTIONS:
        frame = gradwire.encode(x, case["codec"], target=target, threads=threads)
        assert frame == expected, (target, threads)


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_decode_what_was_encoded(case: Case) -> None:
    frame = read(case["frame"])
    expected = spec.decode_frame(frame)
    for target, threads in EXECUTIONS:
        values = gradwire.decode(frame, target=target, threads=threads)
        assert values.tobytes() == expected, (target, threads)


@pytest.mark.parametrize("case", FEEDBACK, ids=name_of)
def test_encode_with_residual(case: Case) -> None:
    x = array(read(case["input"]))
    for target, threads in EXECUTIONS:
        compressor = gradwire.Compressor(case["codec"], x.size, target=target, threads=threads)
        state = compressor.state_dict()
        state["residual"] = array(read(case["residual_in"]))
        compressor.load_state_dict(state)
        frame = compressor.encode(x)
        assert frame == read(case["frame"]), (target, threads)
        assert compressor.residual is not None
        assert compressor.residual.tobytes() == read(case["residual_out"]), (target, threads)


@pytest.mark.parametrize("case", FRAMES, ids=name_of)
def test_decode(case: Case) -> None:
    frame = read(case["frame"])
    expected = read_values(case["values"], case["n"])
    for target, threads in EXECUTIONS:
        values = gradwire.decode(frame, target=target, threads=threads)
        assert values.tobytes() == expected, (target, threads)
        stored = np.full(case["n"], 7.0, np.float32)
        gradwire.decode_into(frame, stored, target=target, threads=threads)
        assert stored.tobytes() == expected, (target, threads)


@pytest.mark.parametrize("case", FRAMES, ids=name_of)
def test_decode_onto_a_sum(case: Case) -> None:
    frame = read(case["frame"])
    values = array(read_values(case["values"], case["n"]))
    start = array(struct.pack("<5f", -0.0, 0.0, 1.5, -2.0, 3e38))
    start = np.resize(start, case["n"])
    # Values that were not sent are not added, because +0.0 would turn -0.0 into 0.0. The same holds
    # for an empty payload.
    codec = payloads.CODECS[spec.parse_frame(frame).codec]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = start + values
    if codec.LEAVES_OUT_ZEROS or len(frame) == 32:
        expected[values.view(np.uint32) == 0] = start[values.view(np.uint32) == 0]
    finite = ~np.isnan(expected)
    for target, threads in EXECUTIONS:
        total = start.copy()
        gradwire.decode_into(frame, total, accumulate=True, target=target, threads=threads)
        assert np.array_equal(np.isnan(total), ~finite)
        assert total[finite].tobytes() == expected[finite].tobytes(), (target, threads)


@pytest.mark.parametrize("case", PACKETS, ids=name_of)
def test_inspect_packet(case: Case) -> None:
    told = gradwire.inspect(read(case["packet"]))
    assert told["kind"] == "packet"
    assert told["direction"] == case["direction"]
    for key in ("source", "step"):
        assert told[key] == case[key]
    assert told["layout_digest"] == int(case["layout_digest"], 16)
    assert bool(told["non_finite"]) == bool(case["non_finite"])
    assert len(told["frames"]) == len(case["frames"])
    for frame, expected in zip(told["frames"], case["frames"], strict=True):
        assert frame["codec"].partition(":")[0] == expected["codec"]
        assert (frame["numel"], frame["payload_bytes"]) == (
            expected["n"],
            expected["payload_bytes"],
        )


@pytest.mark.parametrize("case", CONTAINERS, ids=name_of)
def test_container(case: Case) -> None:
    data = read(case["container"])
    read_back = container.parse(data)
    assert read_back.kind == case["restores"]
    assert read_back.metadata == case["metadata"]
    assert len(read_back.tensors) == len(case["tensors"])
    for tensor, expected in zip(read_back.tensors, case["tensors"], strict=True):
        assert (tensor.name, tensor.dtype) == (expected["name"], expected["dtype"])
        assert (list(tensor.shape), tensor.storage) == (expected["shape"], expected["storage"])
        assert bytes(tensor.data) == read(expected["data"])
    assert b"".join(container.serialize(read_back)) == data


def arrays_of(case: Case) -> tuple[np.ndarray, np.ndarray, int]:
    """The base and the result of a delta, and the width of an element."""
    width = 1 << case["element"] % 16
    size, at = case["n"] * width, case["at"]
    base = np.resize(np.frombuffer(read(case["base"]), np.uint8), size)
    result, overlay = base.copy(), np.frombuffer(read(case["result"]), np.uint8)
    result[at : at + overlay.size] = overlay
    return base, result, width


@pytest.mark.parametrize("case", cases("deltas"), ids=name_of)
def test_delta(case: Case) -> None:
    base, result, width = arrays_of(case)
    data = read(case["delta"])
    for target, threads in EXECUTIONS:
        values = base.copy()
        _core.apply_delta(data, values, target=target, threads=threads)
        assert np.array_equal(values, result), (target, threads)
        if not case["exact"]:
            continue
        room, copy = np.empty(_core.max_delta_size(case["n"], width), np.uint8), base.copy()
        written = _core.encode_delta(
            copy,
            result,
            room,
            width=width,
            is_float=case["element"] >= 16,
            follow=True,
            threads=threads,
            target=target,
        )
        assert room[: written["size"]].tobytes() == data, (target, threads)
        assert np.array_equal(copy, result), (target, threads)


@pytest.mark.parametrize("case", [case for case in cases("errors") if "delta" in case], ids=name_of)
def test_delta_is_refused(case: Case) -> None:
    for target, threads in EXECUTIONS:
        values = np.zeros(2 * case["n"], np.uint8)
        with pytest.raises(gradwire.GradwireError) as refusal:
            _core.apply_delta(read(case["delta"]), values, target=target, threads=threads)
        assert refusal.value.code == case["status"], (target, threads)


def test_deltas_have_every_mode() -> None:
    modes = set()
    for case in cases("deltas"):
        modes |= {mode for mode, _ in delta.chunks_of(delta.parse(read(case["delta"])))}
    assert modes == {delta.UNCHANGED, delta.SPARSE, delta.DENSE, delta.VERBATIM}


def read_container(data: bytes) -> None:
    """Makes all checks that a reader makes before it decodes the frames."""
    container.check_frames(container.parse(data))


@pytest.mark.parametrize(
    "case", [case for case in cases("errors") if "container" in case], ids=name_of
)
def test_container_is_refused(case: Case) -> None:
    with pytest.raises(container.ContainerError) as refusal:
        read_container(read(case["container"]))
    assert refusal.value.code == case["status"]


@pytest.mark.parametrize("case", [case for case in cases("errors") if "frame" in case], ids=name_of)
def test_frame_is_refused(case: Case) -> None:
    frame = read(case["frame"])
    for target, threads in EXECUTIONS:
        with pytest.raises(gradwire.GradwireError) as refusal:
            gradwire.decode(frame, target=target, threads=threads)
        assert refusal.value.code == case["status"], (target, threads)
        assert str(refusal.value)


@pytest.mark.parametrize(
    "case", [case for case in cases("errors") if "packet" in case], ids=name_of
)
def test_packet_is_refused(case: Case) -> None:
    data = read(case["packet"])
    if data[:2] != b"GP":  # inspect tells frames from packets by these bytes and refuses others
        with pytest.raises(gradwire.GradwireError):
            gradwire.inspect(data)
        return
    with pytest.raises(gradwire.GradwireError) as refusal:
        gradwire.inspect(data)
    assert refusal.value.code == case["status"]


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_non_finite_input_is_warned_of(case: Case) -> None:
    x = array(read_values(case["input"], case["n"]))
    marked = gradwire.inspect(read(case["frame"]))["non_finite"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradwire.encode(x, case["codec"])
    assert bool(caught) == marked
    if marked:
        assert caught[0].category is gradwire.NonFiniteWarning
        assert str(int(np.flatnonzero(~np.isfinite(x))[0])) in str(caught[0].message)


def test_cases_are_those_of_a_codec() -> None:
    """make_golden.py finds cases by the name of the codec's module, so no other name may occur."""
    cases_of = {path.stem for path in (ROOT / "scripts/golden_cases/codecs").glob("[a-z]*.py")}
    twins = {name for name, module in payloads.MODULES.items() if hasattr(module, "NUMBER")}
    assert cases_of <= twins


def test_the_folder_holds_what_the_index_names_and_nothing_else() -> None:
    named = {
        entry[key]
        for kind in ("encode", "decode", "deltas", "errors")
        for case in cases(kind)
        for entry in (case, *case.get("frames", ()), *case.get("tensors", ()))
        for key in FILES
        if key in entry
    }
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert there == named | {"README.md", "index.json"}
    size = sum((FOLDER / name).stat().st_size for name in there)
    # Git keeps every version of every file. The limit leaves a new codec its room: most take less.
    most = BYTES_PER_CODEC * len(payloads.CODECS)
    assert size < most, f"{size} bytes: use fewer or shorter cases in scripts/golden_cases"
