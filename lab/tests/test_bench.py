"""The measurement of `gradwire bench`: its data, its checks, its numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire
from gradwire.tensor_files import TensorFileError
from gradwire_lab import bench, bench_deltas
from gradwire_lab.bench_data import BenchData, load_data

RECORDED = Path(__file__).parents[2] / "bench" / "data" / "resnet20_gradients.safetensors"


@pytest.fixture(name="data", scope="module")
def _data() -> BenchData:
    return load_data("synthetic", 0)


def test_recorded_gradients_are_found_and_described() -> None:
    safetensors = pytest.importorskip("safetensors")
    assert RECORDED.stat().st_size <= 4 * 10**6
    data = load_data("recorded", 0)
    assert "ResNet-20" in data.description
    with safetensors.safe_open(RECORDED, framework="np") as file:
        sizes = [int(np.prod(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
    assert data.period.size == sum(sizes)
    assert data.period.dtype == np.float32
    assert np.isfinite(data.period).all()
    # Each tensor's largest magnitude is 1, so there are at least as many ones as tensors.
    assert (np.abs(data.period) == 1).sum() >= len(sizes)
    assert load_data("auto", 0).description == data.description


def test_without_a_source_tree_auto_is_synthetic_and_recorded_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire_lab.bench_data.find_checkout", lambda: None)
    assert load_data("auto", 0).name == "synthetic"
    with pytest.raises(TensorFileError, match="belongs to the source tree"):
        load_data("recorded", 0)


def test_a_file_of_ones_own_can_be_measured_on(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([[1, -4], [0, 2]], np.float32))
    assert load_data(str(path), 0).period.tolist() == [0.25, -1, 0, 0.5]
    np.save(path, np.zeros(3, np.float32))
    assert load_data(str(path), 0).period.tolist() == [0, 0, 0]
    refused: list[tuple[NDArray[Any], str]] = [
        (np.array([1, np.nan], np.float32), "NaN or Inf"),
        (np.array([1, np.inf], np.float32), "NaN or Inf"),
        (np.arange(3), "no float32"),
        (np.zeros(0, np.float32), "no float32"),
    ]
    for wrong, message in refused:
        np.save(path, wrong)
        with pytest.raises(TensorFileError, match=message):
            load_data(str(path), 0)


def test_windows_repeat_the_period_and_start_at_cache_lines(data: BenchData) -> None:
    period = np.arange(1000, dtype=np.float32)
    windows = BenchData("count", "", period).windows(5000, 20, seed=1)
    starts = {int(window[0]) for window in windows}
    assert len(starts) > 5
    for window in windows:
        assert window.size == 5000
        assert (np.diff(window) % 1000 == 1).all()
    offsets = {(window.ctypes.data - windows[0].ctypes.data) % 64 for window in windows}
    assert offsets == {0}
    assert load_data("synthetic", 1).period[:5].tolist() != data.period[:5].tolist()


@pytest.mark.parametrize("numel", [1, 7, 1000, 50_001])
@pytest.mark.parametrize(
    "codec",
    [
        "raw",
        "bf16",
        "bf16:ef=on",
        "3lc",
        "3lc:s=1.75,bucket=35",
        "3lc:coder=none,s=1.2",
        "3lc:ef=off",
        "3lc:residual=bf16",
    ],
)
def test_every_target_passes_the_check(data: BenchData, codec: str, numel: int) -> None:
    work = bench.Workload(codec, numel, data, 0)
    for target in gradwire.simd_targets():
        bench.check(work, target, 2)


class _Wrong:
    """A compressor whose encode or residual is wrong on every target but scalar."""

    def __init__(self, real: gradwire.Compressor, target: str, what: str) -> None:
        self.real, self.wrong = real, what if target != "scalar" else ""

    @property
    def residual(self) -> Any:
        residual = self.real.residual
        return residual + 1 if self.wrong == "residual" and residual is not None else residual

    def encode(self, x: NDArray[np.float32]) -> bytes:
        frame = self.real.encode(x)
        return frame[:-1] if self.wrong == "bytes" else frame


@pytest.mark.parametrize("what", ["bytes", "residual"])
def test_the_check_finds_a_target_that_differs(
    data: BenchData, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    work = bench.Workload("3lc", 1000, data, 0)
    make = work.compressor
    monkeypatch.setattr(
        work, "compressor", lambda target, threads: _Wrong(make(target, threads), target, what)
    )
    with pytest.raises(bench.CheckError, match=f"not the {what} of the scalar target"):
        bench.check(work, "auto", 1)


def test_the_check_finds_a_wrong_decode_add(
    data: BenchData, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gradwire.decode_into

    def wrong(frame: Any, out: Any, accumulate: bool = False, **options: Any) -> None:
        real(frame, out, accumulate, **options)
        out[5] += accumulate

    monkeypatch.setattr(gradwire, "decode_into", wrong)
    with pytest.raises(bench.CheckError, match="decode_add is not decode and add"):
        bench.check(bench.Workload("3lc", 1000, data, 0), "auto", 1)


def test_numbers_fit_together(data: BenchData) -> None:
    numel = 1 << 22
    work = bench.Workload("raw", numel, data, 0)
    for threads in (1, 2):
        case = bench.Case("raw", numel, "encode", "auto", threads)
        measured = bench.measure(work, case, 0.01)
        assert measured.gb_per_s == pytest.approx(4e-9 * numel / measured.seconds)
        assert measured.share_of_memcpy == measured.gb_per_s / measured.memcpy_gb_per_s
        assert measured.bits_per_value == 32 + 8 * 32 / numel
        assert measured.repetitions >= 7
        assert 0 < measured.call_overhead < measured.seconds
        assert (measured.parallel_memcpy_gb_per_s is None) == (threads == 1)


def test_values_that_are_all_zero_have_no_error() -> None:
    zeros = BenchData("zeros", "zeros", np.zeros(100, np.float32))
    assert bench.Workload("3lc", 50, zeros, 0).relative_error == 0.0


def test_a_residual_has_its_size_before_anything_is_timed(data: BenchData) -> None:
    numel = 30_000
    work = bench.Workload("3lc:s=1.75", numel, data, 0)
    fresh = gradwire.Compressor("3lc:s=1.75", numel)
    first = len(fresh.encode(work.windows[0]))
    assert np.mean([len(frame) for frame in work.frames]) > 1.1 * first
    a, b = work.compressor("auto", 1).residual, work.compressor("scalar", 1).residual
    assert a is not None
    assert b is not None
    assert a.any()
    assert np.array_equal(a, b)


def test_each_operation_times_its_own_call(
    data: BenchData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        assert arguments[2:] == (True,) or options["accumulate"] is True
        raise RuntimeError("decode_into was called")

    work = bench.Workload("3lc", 1000, data, 0)
    monkeypatch.setattr(bench, "check", lambda *arguments: "nothing")
    monkeypatch.setattr(gradwire, "decode_into", refuse)
    bench.measure(work, bench.Case("3lc", 1000, "encode", "auto", 1), 0.001)
    with pytest.raises(RuntimeError, match="decode_into was called"):
        bench.measure(work, bench.Case("3lc", 1000, "decode_add", "auto", 1), 0.001)


def test_large_frames_are_few(data: BenchData, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(bench.Workload("raw", 1000, data, 0).frames) == 8
    monkeypatch.setattr(bench, "_FRAME_BYTES", 5 * (4000 + 32))
    assert len(bench.Workload("raw", 1000, data, 0).frames) == 5
    monkeypatch.setattr(bench, "_FRAME_BYTES", 1)
    assert len(bench.Workload("raw", 1000, data, 0).frames) == 2


@pytest.mark.parametrize("change", bench_deltas.CHANGES)
def test_deltas_are_checked_and_measured(change: str) -> None:
    numel = 70_000
    row = bench_deltas.measure(change, numel, 0.001, 0)
    share = bench_deltas.SHARES.get(change)
    assert row.changed == pytest.approx(share or 1, rel=0.2)
    assert row.encode_of_memcpy == pytest.approx(1.5 * row.encode / row.memcpy)
    assert row.apply_decoded > 0
    assert row.apply_of_memcpy == pytest.approx(row.apply / row.memcpy)
    # A third of what a changed value would take as an index and a value; not below the entropy.
    assert row.entropy is None or row.entropy < row.bits < 16
    for bits, rate, rate_back in row.others.values():
        assert row.bits < bits
        assert rate > 0 < rate_back


def test_a_delta_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._core.apply_delta", lambda delta, values: None)
    with pytest.raises(bench.CheckError, match="check failed: bf16 1 %, 500 values: not the resul"):
        bench_deltas.measure("bf16 1 %", 500, 0.001, 0)


def test_general_purpose_compressors_are_measured_where_they_are_installed() -> None:
    script = Path(__file__).parents[2] / "bench" / "general_compressors.py"
    command = [sys.executable, str(script), "--numel", "3000", "--seconds", "0.001"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for package in ("zstandard", "lz4", "snappy", "zfpy"):
        assert package in done.stdout
