"""`gradwire train --device`: refusals before a worker starts, and the device of each worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from cli_runner import run
from gradwire_lab.train import checks, devices, report, report_table
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.records import MetricValue, RankRecord
from gradwire_lab.train.settings import SettingsError, TrainSettings

CUDA = TrainSettings(workers=3, device="cuda")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices_by_name(device: str) -> None:
    checks.check(replace(TrainSettings(), device=device))


@pytest.mark.parametrize("device", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1 ", "cudax"])
def test_another_name_is_an_error_that_lists_the_valid(device: str) -> None:
    with pytest.raises(SettingsError, match="valid are cpu, cuda, cuda:K") as caught:
        checks.check(replace(TrainSettings(), device=device))
    assert caught.value.option == "--device"


@pytest.mark.parametrize("exchange", ["terngrad", "server", "sharded-optimizer"])
def test_every_exchange_goes_with_a_gpu(exchange: str) -> None:
    settings = replace(CUDA, exchange=exchange)
    if exchange == "terngrad":
        settings = replace(settings, codecs=("terngrad",))
    checks.check(settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_starts() -> None:
    ended = run("train", "--device", "cuda", "--data-dir", "/nonexistent")
    assert ended.code == 1
    assert f"--device cuda: PyTorch {torch.__version__} has no GPU here: " in ended.err
    assert "CUDA" in ended.err.partition("here:")[2] or "NVIDIA" in ended.err


def test_a_gpu_that_is_not_there(two_gpus: None) -> None:
    with pytest.raises(TrainError, match="there are 2 GPUs here, cuda:0 to cuda:1"):
        devices.check_usable(replace(CUDA, device="cuda:2"))


def test_a_gpu_that_is_there(two_gpus: None) -> None:
    devices.check_usable(CUDA)
    devices.check_usable(replace(CUDA, device="cuda:1"))


def test_workers_take_gpus_in_turn(two_gpus: None) -> None:
    places = [str(devices.of_worker("cuda", worker)) for worker in range(3)]
    assert places == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(devices.of_worker("cuda:1", 0)) == "cuda:1"
    assert str(devices.of_worker("cpu", 5)) == "cpu"


def test_times_are_taken_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices.wait_for(torch.device("cpu"))
    assert not waited
    devices.wait_for(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]


def test_the_report_names_the_gpus() -> None:
    names = ["cuda:0 (A)", "cuda:1 (B)", "cuda:0 (A)"]
    records = [
        RankRecord("ddp", rank, 1.0, [1.0], evaluations=[MetricValue(1, 1.0, 0.5)], device=name)
        for rank, name in enumerate(names)
    ]
    links = report.Conditions(shaped=False, modelled=False)
    chosen = replace(CUDA, codecs=("ddp",), bandwidth=None)
    made = report.Report(chosen, 10, "", links, [report.result_of(chosen, 10, links, records)])
    assert made.to_json({})["results"][0]["device_of_worker"] == names
    note = report_table.footnotes(made)[1]
    assert note.startswith("Computed on cuda:0 (A): worker 0, 2; cuda:1 (B): worker 1.")
    assert "share a GPU" in note
    on_cpu = replace(made, settings=replace(made.settings, device="cpu"))
    assert "Computed" not in " ".join(report_table.footnotes(on_cpu))
