"""All workers of a training in one process, and bench/ten_workers.py, which compares designs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cli_runner import run
from small_data import write_fashion_mnist

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

import ten_workers
from gradwire.train import data, launcher, models
from gradwire.train.data import Batches, Images
from gradwire.train.launcher import OnEvent
from gradwire.train.loop import Trainer
from gradwire.train.one_process import FlatModel
from gradwire.train.records import RankRecord
from gradwire.train.schedule import learning_rate
from gradwire.train.settings import Run, TrainSettings

SETTING = TrainSettings(
    exchange="one-process", bandwidth=None, steps=4, workers=3, batch=4, eval_every=4, seed=7
)

WEIGHTS = [2400, 48000, 10080, 840]  # of lenet; conv1 has 150, fewer than min_numel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion_mnist(tmp_path_factory.mktemp("data") / "fashion-mnist", 300, 100)


@pytest.fixture(scope="module")
def images(folder: Path) -> Images:
    return data.load_images("fashion-mnist", folder)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    threads = torch.get_num_threads()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    # One thread: several, which spin while they wait, are slow on a busy machine.
    with mock.patch("os.sched_getaffinity", return_value={0}):
        yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def simulate(images: Images, codec: str, **other: Any) -> RankRecord:
    trainer = Trainer(replace(SETTING, **other), images, 0, None, torch.device("cpu"))
    return trainer.run(Run(codec, SETTING.seed), lambda event: None)


def bits(record: RankRecord, sent: str) -> float:
    """Bits per value and step."""
    assert record.hook is not None
    return float(8 * record.hook[sent] / record.hook["values"] / SETTING.steps)


def payload_bits(record: RankRecord, leg: str) -> float:
    assert record.hook is not None
    return float(record.hook[f"compressed_bits_{leg}"])


def plain_losses(images: Images, every: int) -> list[float]:
    """The losses without gradwire: one model, PyTorch's SGD, `every` batches of each worker."""
    model = models.build("lenet", 1, 28, 10, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4)
    batches = Batches(images, 12, world=1, rank=0, seed=7)
    losses = []
    for step in range(SETTING.steps):
        pixels, labels = (torch.from_numpy(array) for array in batches.at(step))
        loss = nn.functional.cross_entropy(model(pixels), labels)
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            optimizer.param_groups[0]["lr"] = learning_rate(SETTING, step)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("every", [1, 2])
def test_raw_is_plain_training(images: Images, every: int) -> None:
    record = simulate(images, "raw", every=every)
    assert record.losses == pytest.approx(plain_losses(images, every), rel=1e-4)
    assert payload_bits(record, "push") == payload_bits(record, "pull") == 32  # of an exchange
    assert 32 / every < bits(record, "push_bytes") < 32.1 / every  # headers


def quantize(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """3LC with s = 1.5, tensor by tensor; the residual keeps the error."""
    wanted = x + residual
    arrived = wanted.copy()
    start = 0
    for numel in WEIGHTS:
        part = slice(start, start + numel)
        scale = np.float32(1.5) * np.abs(wanted[part]).max()
        arrived[part] = np.sign(wanted[part]) * (np.abs(wanted[part]) > scale / 2) * scale
        start += numel
    residual[:] = wanted - arrived
    return arrived


def test_residuals_of_workers_and_server(images: Images) -> None:
    """Compares with plain NumPy, in which every vector holds WEIGHTS, conv1 and the biases."""
    model = models.build("lenet", 1, 28, 10, seed=7)
    parameters = sorted(model.parameters(), key=lambda p: (p.numel() not in WEIGHTS, p.dim() == 1))
    server = np.concatenate([p.detach().numpy().ravel() for p in parameters])
    replica, momentum, pull = server.copy(), np.zeros_like(server), np.zeros_like(server)
    pushes = [np.zeros_like(server) for _ in range(SETTING.workers)]
    batches = Batches(images, 12, world=1, rank=0, seed=7)
    losses = []
    for step in range(SETTING.steps):
        nn.utils.vector_to_parameters(torch.from_numpy(replica.copy()), parameters)
        pixels, labels = (torch.from_numpy(array) for array in batches.at(step))
        mean, loss_of_all = np.zeros_like(server), 0.0
        for worker, residual in enumerate(pushes):
            own = slice(4 * worker, 4 * worker + 4)
            loss = nn.functional.cross_entropy(model(pixels[own]), labels[own])
            gradients = torch.autograd.grad(loss, parameters)
            flat = np.concatenate([gradient.numpy().ravel() for gradient in gradients])
            mean += quantize(flat, residual) / SETTING.workers
            loss_of_all += loss.item()
        losses.append(loss_of_all / SETTING.workers)
        momentum = 0.9 * momentum + mean + 1e-4 * server
        change = -learning_rate(SETTING, step) * momentum
        server = server + change.astype(np.float32)
        replica += quantize(change.astype(np.float32), pull)
    assert simulate(images, "3lc:s=1.5").losses == pytest.approx(losses, rel=1e-4)
    assert abs(losses[-1] - plain_losses(images, 1)[-1]) > 1e-3


ADAMW = {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "clip": 0.5}


def adamw_losses(images: Images) -> list[float]:
    """The losses without gradwire: PyTorch's AdamW."""
    model = models.build("lenet", 1, 28, 10, seed=7)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.1)
    batches, losses = Batches(images, 12, world=1, rank=0, seed=7), []
    for step in range(SETTING.steps):
        pixels, labels = (torch.from_numpy(array) for array in batches.at(step))
        loss = nn.functional.cross_entropy(model(pixels), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(replace(SETTING, workers=1, learning_rate=0.01), step)
        optimizer.step()
    return losses


def test_adamw(images: Images) -> None:
    """tests/torch/test_train_ranks.py compares its updates with those of LocalSteps."""
    plain = adamw_losses(images)
    assert simulate(images, "raw", **ADAMW).losses == pytest.approx(plain, rel=1e-4)
    updates = {"compress": "updates", **ADAMW}
    assert simulate(images, "ddp", **updates).losses == pytest.approx(plain, rel=1e-4)
    assert simulate(images, "raw", **updates).losses[-1] != pytest.approx(plain[-1], rel=1e-4)


def test_updates_of_several_steps_are_pushed_together(images: Images) -> None:
    """With SGD, one worker, and raw, the model is that of a training without exchanges."""
    alone = {"workers": 1, "batch": 12, "compress": "updates"}
    losses = [simulate(images, "raw", every=every, **alone).losses for every in (1, 2, 4)]
    assert losses[1] == pytest.approx(losses[0])
    assert losses[2] == pytest.approx(losses[0])
    record = simulate(images, "raw", every=2, **alone)
    assert [sent is not None and sent > 0 for sent in record.push_bytes] == [False, True] * 2


def test_dropout_is_the_same_for_every_codec(images: Images) -> None:
    dropped = simulate(images, "raw", dropout=0.5).losses
    assert dropped == simulate(images, "raw", dropout=0.5).losses
    assert dropped[0] == simulate(images, "3lc", dropout=0.5).losses[0]
    assert dropped[0] != simulate(images, "raw").losses[0]


def test_the_average_of_the_weights_is_evaluated() -> None:
    from gradwire.train.loop import Average

    average = Average([torch.zeros(2)], decay=0.5)
    average.add([torch.ones(2)])  # the first decay is 2/11
    assert average.weights[0].tolist() == pytest.approx([9 / 11] * 2)
    for _ in range(50):
        average.add([torch.ones(2)])
    for _ in range(2):
        average.add([torch.zeros(2)])
    assert average.weights[0].tolist() == pytest.approx([0.25] * 2)


def test_the_way_of_each_codec(images: Images) -> None:
    record = simulate(images, "int8/raw")
    assert payload_bits(record, "push") == pytest.approx(8, abs=0.1)
    assert payload_bits(record, "pull") == 32


def test_small_tensors_go_raw_and_the_rest_is_compressed(images: Images) -> None:
    record = simulate(images, "stoch3:coder=none")
    payload = sum(8 * (4 + -(-n // 5)) for n in WEIGHTS) / sum(WEIGHTS)  # a scale, 5 to a byte
    assert payload_bits(record, "push") == payload_bits(record, "pull")
    assert payload_bits(record, "push") == pytest.approx(payload, abs=0.01)
    raw = 8 * (4 * (150 + 236) + 5 * 32)  # conv1, biases and headers
    whole = (payload * sum(WEIGHTS) + raw) / 61706
    assert bits(record, "push_bytes") == pytest.approx(whole, abs=0.01)
    assert record.losses[0] == pytest.approx(plain_losses(images, 1)[0], rel=1e-5)
    assert record.losses[-1] != pytest.approx(plain_losses(images, 1)[-1], rel=1e-5)


def test_the_same_seed_is_the_same_training(images: Images) -> None:
    one, other = (simulate(images, "3lc:s=1.5") for _ in range(2))
    assert (one.losses, one.hook) == (other.losses, other.hook)
    assert one.evaluations[-1].value == other.evaluations[-1].value


def test_the_servers_model_is_evaluated(images: Images) -> None:
    """The server's weights are evaluated, which differ from the replica's with compressed pulls."""
    from gradwire.train.one_process import OneProcess

    model = models.build("lenet", 1, 28, 10, seed=7)
    strategy = OneProcess(model, "3lc:s=1.5", SETTING)
    pixels, labels = (torch.from_numpy(a) for a in Batches(images, 12, 1, 0, 7).at(0))
    strategy.take_step(pixels, labels)
    server = torch.cat([weight.flatten() for weight in strategy.weights()])
    snapshot = strategy.snapshot(strategy.weights())
    assert torch.equal(server, nn.utils.parameters_to_vector(snapshot.parameters()))
    assert not torch.equal(server, nn.utils.parameters_to_vector(model.parameters()))


@pytest.mark.parametrize(
    ("codec", "optimizer", "compress", "remarks"),
    [
        ("3lc/raw", "adamw", "gradients", 1),
        ("raw/3lc", "adamw", "gradients", 0),
        ("3lc", "adamw", "updates", 0),
        ("3lc", "sgd", "gradients", 0),
        ("ddp", "adamw", "gradients", 0),
    ],
)
def test_coarse_gradients_of_an_adaptive_optimizer_are_remarked(
    images: Images, codec: str, optimizer: str, compress: str, remarks: int
) -> None:
    record = simulate(images, codec, optimizer=optimizer, compress=compress, steps=1, eval_every=1)
    assert record.hook is not None
    assert len(record.hook["remarks"]) == remarks
    for remark in record.hook["remarks"]:
        assert "AdamW learns several times too slowly from gradients compressed with 3lc" in remark


def test_a_loss_that_is_not_finite_ends_the_training(images: Images) -> None:
    record = simulate(images, "raw", learning_rate=1e12, steps=50)
    assert record.diverged is not None
    assert record.diverged == len(record.losses) < 50
    assert record.losses[-1] is None
    assert record.evaluations == [e for e in record.evaluations if e.step < record.diverged]


def test_statistics_are_those_of_the_first_worker() -> None:
    model = FlatModel(models.build("resnet20", 1, 28, 10, seed=0), min_numel=256)
    norm = model.module.get_submodule("bn1")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    before = norm.running_mean.clone()
    gradient = model.views(torch.zeros_like(model.weights))
    batch = torch.ones(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64)
    model.add_gradient(*batch, gradient, is_first=False)
    assert torch.equal(norm.running_mean, before)
    model.add_gradient(*batch, gradient, is_first=True)
    assert not torch.equal(norm.running_mean, before)


Call = Callable[..., tuple[str, str]]


def options_of(folder: Path, results: Path, *more: str) -> list[str]:
    return [str(results), "--model", "lenet", "--data-dir", str(folder), "--batch", "2", *more]


@pytest.fixture
def _in_this_process(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher starts no process for the workers."""

    def run_workers(
        settings: TrainSettings, runs: list[Run], shaped: bool, on_event: OnEvent
    ) -> list[list[RankRecord]]:
        trainer = Trainer(settings, images, 0, None, torch.device("cpu"))
        on_event(0, {"event": "ready", **trainer.measure_speed()})
        records = [[trainer.run(run, partial(on_event, 0))] for run in runs]
        for (record,) in records:
            on_event(0, {"event": "record", "record": record})
        return records

    monkeypatch.setattr(launcher, "run_workers", run_workers)


@pytest.mark.usefixtures("_in_this_process")
def test_the_report_of_the_command(folder: Path) -> None:
    options = ["--batch", "16", "--steps", "24", "--every", "2", "--eval-every", "12"]
    options += ["--data-dir", str(folder), "--codec", "3lc:s=1.0", "--json", "-"]
    result = run("train", "--exchange", "one-process", *options)
    (trained,) = result.json["results"]
    assert trained["replicas_identical"]
    assert sum(trained["loss"][-4:]) < 0.99 * sum(trained["loss"][:4])
    assert [bits > 0 for bits in trained["push_bits"]] == [False, True] * 12
    assert trained["hook_of_rank"][0]["steps"] == 12
    assert trained["ratio"] > 4
    assert "exchange   one-process, every 2 steps, gradients are summed between" in result.err


@pytest.mark.usefixtures("_in_this_process")
def test_codecs_chosen_at_run_time(folder: Path) -> None:
    options = ["--batch", "4", "--steps", "24", "--eval-every", "24", "--json", "-"]
    options += ["--data-dir", str(folder), "--codec", "auto:bits=1,every=5/auto:bits=6"]
    result = run("train", "--exchange", "one-process", *options)
    (trained,) = result.json["results"]
    assert trained["replicas_identical"]
    values = trained["hook_of_rank"][0]["values"] * 24
    pushed, pulled = (trained["hook_of_rank"][0][f"{way}_bytes"] for way in ("push", "pull"))
    assert 8 * pushed / values < 2 < 4 < 8 * pulled / values < 7
    chosen = trained["hook_of_rank"][0]["chosen"]
    names = ["conv2.weight", "fc1.weight", "fc2.weight", "fc3.weight"]
    assert [(c["direction"], c["tensor"]) for c in chosen] == [
        (way, name) for way in ("push", "pull") for name in names
    ]
    assert {(c["goal"], c["decisions"]) for c in chosen} == {
        ("auto:bits=1,every=5", 7),
        ("auto:bits=6", 5),
    }


@pytest.mark.usefixtures("_in_this_process")
def test_a_budget_that_a_short_run_exceeds_is_remarked(folder: Path) -> None:
    options = ["--batch", "4", "--steps", "4", "--data-dir", str(folder), "--json", "-"]
    result = run("train", "--exchange", "one-process", "--codec", "auto:bits=0.02", *options)
    assert result.code == 0
    assert "auto:bits=0.02: auto:bits=0.02, push: exceeds its limit, because" in result.err


def test_auto_with_an_exchange_that_cannot_choose() -> None:
    result = run("train", "--exchange", "ring", "--codec", "auto:bits=1")
    assert result.code == 2
    assert "auto goes with --exchange sharded" in result.err


@pytest.mark.usefixtures("_in_this_process")
def test_a_command_goes_on_where_it_was_interrupted(folder: Path, tmp_path: Path) -> None:
    options = ["--batch", "4", "--steps", "2", "--data-dir", str(folder), "--out", str(tmp_path)]
    options += ["--seeds", "2", "--lr", "0.01", "--threads", "1", "--json", "-"]
    options = ["train", "--exchange", "one-process", *options]
    first = run(*options, "--codec", "raw")
    assert "resumed" not in first.err
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(path.name for path in before) == ["raw-0.json", "raw-1.json"]
    again = run(*options, "--codec", "raw", "--codec", "int8")
    assert "resumed    2 of 4 runs are in" in again.err
    assert [(r["codec"], r["seed"]) for r in again.json["results"]] == [
        (codec, seed) for seed in (0, 1) for codec in ("raw", "int8")
    ]
    compared = {"seconds_to_goal": None}  # the goal takes two codecs
    assert again.json["results"][0] | compared == first.json["results"][0]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    other = run(*options, "--codec", "raw", "--clip", "1")
    assert other.code == 1
    assert "raw-0.json holds a run with other settings: clip 0.0 instead of 1.0" in other.err
    images = write_fashion_mnist(tmp_path / "other", 200, 100)
    other = run(*options, "--codec", "raw", "--data-dir", str(images))
    assert other.code == 1
    assert "data 300 images, 100 test images instead of 200 images, 100 test images" in other.err


def test_a_run_ends_when_it_reached_its_goal(images: Images) -> None:
    usual = {"steps": 6, "eval_every": 2}
    assert len(simulate(images, "raw", until=0.01, **usual).losses) == 2
    assert len(simulate(images, "raw", until=1.0, **usual).losses) == 6


def test_evaluations_take_no_training_time(images: Images) -> None:
    def evaluate(*arguments: Any) -> float:
        time.sleep(0.5)
        return 0.5

    with mock.patch.object(Trainer, "_value", evaluate):
        record = simulate(images, "raw", eval_every=1)
    assert len(record.evaluations) == 4
    assert record.evaluations[-1].seconds <= record.seconds < 4 * 0.5


@pytest.mark.usefixtures("_in_this_process")
def test_the_rest_goes_on_after_a_run_that_diverged(folder: Path) -> None:
    options = ["--batch", "4", "--steps", "6", "--data-dir", str(folder), "--lr", "100"]
    options += ["--codec", "raw", "--codec", "int8", "--warmup", "0", "--json", "-"]
    result = run("train", "--exchange", "one-process", *options)
    assert result.code == 0
    assert [one["final"] for one in result.json["results"]] == [None, None]
    assert result.err.count("DIVERGED in step") == 2


@pytest.mark.usefixtures("_in_this_process")
def test_the_rest_goes_on_after_a_limit_that_cannot_be_kept(folder: Path) -> None:
    options = ["--batch", "2", "--workers", "2", "--steps", "60", "--eval-every", "20"]
    options += ["--data-dir", str(folder), "--json", "-"]
    for codec in ("raw", "auto:bits=0.02", "int8"):
        options += ["--codec", codec]
    result = run("train", "--exchange", "one-process", *options)
    assert result.code == 0, result.err
    raw, auto, int8 = result.json["results"]
    assert raw["final"] is not None
    assert int8["final"] is not None
    assert (auto["final"], auto["diverged"], len(auto["loss"])) == (None, None, 50)
    assert [evaluation["step"] for evaluation in auto["evaluations"]] == [20, 40]
    said = "FAILED: 'auto:bits=0.02' can't be kept: on these tensors the codecs that send least"
    assert f"auto:bits=0.02, seed 0: {said}" in result.err


@pytest.fixture
def call(
    _in_this_process: None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """Runs the program here, and the trainings too. Returns what it wrote on stdout and stderr."""

    def call(results: Path, *more: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["ten_workers", *options_of(folder, results, *more)])
        ten_workers.main()
        return capsys.readouterr()

    return call


def test_a_call_goes_on_where_another_ended(folder: Path, tmp_path: Path, call: Call) -> None:
    results = tmp_path / "results"
    usual = ["--steps", "3", "--seeds", "1", "--design", "raw"]
    command = [sys.executable, ten_workers.__file__, *options_of(folder, results, *usual)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert first.returncode == 0, first.stderr
    assert "raw, seed 0" in first.stderr
    found = json.loads((results / "run-raw-0.json").read_text())
    assert (found["settings"]["steps"], found["settings"]["workers"]) == (3, 10)

    designs = ["--design", "raw", "--design", "3lc-1.75"]
    out, err = call(results, "--steps", "3", "--seeds", "2", *designs)
    for name in ("raw, seed 1", "3lc-1.75, seed 0", "3lc-1.75, seed 1"):
        assert name in err
    assert "raw, seed 0" not in err
    assert out == (results / "table.md").read_text()
    row = next(line for line in out.splitlines() if "1.75" in line)
    assert row.endswith("| 93.51 % | +0.14 | 107.0 |")
    assert json.loads((results / "summary.json").read_text())["3lc-1.75"]["seeds"] == [0, 1]

    with pytest.raises(SystemExit, match="take another folder"):
        call(results, "--steps", "2", *designs)


def test_means_and_spread() -> None:
    sent = dict.fromkeys(ten_workers.BITS, 0.5)
    found = [("raw", 0, 0.5), ("raw", 1, 0.75), ("int8", 0, 0.25), ("int8", 1, None)]
    runs = [{"design": d, "seed": s, "accuracy": a, **sent} for d, s, a in found]
    summary = ten_workers.summarise(runs)
    assert summary["raw"]["measured_accuracy"] == {"mean": 0.625, "min": 0.5, "max": 0.75}
    assert summary["int8"]["measured_difference"] == {"mean": -0.25, "min": -0.25, "max": -0.25}
    assert summary["int8"]["ratio_by_bits"] == 64.0
    raw, int8 = ten_workers.table(summary)[2:]
    assert "| 2 | 62.50 % (50.00 to 75.00) |  | 0.500, 0.500 | 64.0 |" in raw
    assert "| 2 | 25.00 % (1 of 2 seeds diverged) | -25.00 % |" in int8


def test_a_run_that_diverged_is_counted(tmp_path: Path, call: Call) -> None:
    out, _ = call(tmp_path, "--steps", "4", "--seeds", "1", "--lr", "100", "--design", "raw")
    assert "| - (1 of 1 seeds diverged) |" in out
    assert json.loads((tmp_path / "run-raw-0.json").read_text())["diverged"] > 1
