"""`gradwire train` in ranks that are there, as under torchrun: they learn one model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from cli_runner import Result, run
from cluster import Cluster, free_port, started_by_torchrun
from gradwire.local_schedule import GATED_CODEC
from gradwire.torch import loopback
from gradwire_lab.train import data, messages, models, strategies
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.loop import Trainer
from gradwire_lab.train.settings import Rule, Run, TrainSettings
from small_data import write_fashion_mnist

STEPS = 24
WAYS = {
    "sharded": ["--exchange", "sharded"],
    "ring": ["--exchange", "ring"],
    "broadcast": ["--exchange", "broadcast", "--codec", "qsgd:bits=4"],
    "hierarchical": ["--exchange", "hierarchical:ranks=2"],
    "rings in groups": [
        *("--exchange", "hierarchical:between=ring,within=ring,ranks=2,within_codec=bf16")
    ],
    "server": ["--exchange", "server"],
    "stale server": ["--exchange", "server", "--staleness", "2"],
    "server, tensor by tensor": ["--exchange", "server", "--barrier", "tensor"],
    "stale server, tensor by tensor": [
        *("--exchange", "server", "--barrier", "tensor"),
        *("--staleness", "2"),
    ],
    "averaging server": ["--exchange", "server:pulls=gradients", "--codec", "terngrad"],
    "terngrad": ["--exchange", "terngrad", "--codec", "terngrad"],
    "sharded-optimizer": ["--exchange", "sharded-optimizer"],
    "local steps": ["--every", "4"],
    "updates": ["--optimizer", "adamw", "--lr", "0.002", "--clip", "1", "--codec", "3lc/int8"],
}
CODECS = [
    *(codec["name"] for codec in gradwire.codecs()),
    "3lc:coder=rice",
    "terngrad:pack=trits5,coder=rice",
    "qsgd:bits=2,coder=elias",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion_mnist(tmp_path_factory.mktemp("data") / "fashion-mnist", 2000, 100)


def train(arguments: list[str], port: int) -> Result:
    with started_by_torchrun(port):
        return run("train", *arguments, "--json", "-")


def train_in(cluster: Cluster, world_size: int, arguments: list[str]) -> Result:
    """What rank 0 said."""
    first, *others = cluster.run(world_size, train, arguments, free_port())
    assert [(rank.code, rank.out) for rank in others] == [(0, "")] * (world_size - 1), others
    assert isinstance(first, Result)
    return first


@pytest.mark.parametrize(
    "way",
    [["--exchange", "sharded"], ["--exchange", "sharded-optimizer"], ["--compress", "updates"]],
    ids=["hook", "sharded optimizer", "local steps"],
)
def test_the_rest_goes_on_after_a_limit_that_cannot_be_kept(
    way: list[str], folder: Path, cluster: Cluster
) -> None:
    options = ["--batch", "2", "--data-dir", str(folder), "--steps", "60", "--eval-every", "60"]
    options += way
    options += ["--codec", "auto:bits=0.02,every=50", "--codec", "int8"]
    result = train_in(cluster, 3, options)
    auto, int8 = result.json["results"]
    assert "'auto:bits=0.02' can't be kept: on these tensors" in auto["failed"]
    assert len(auto["loss"]) == 49, "the decision after 50 steps must keep it"
    assert auto["replicas_identical"]
    assert int8["final"] is not None


@pytest.mark.parametrize("way", WAYS)
def test_workers_learn_and_agree(way: str, folder: Path, cluster: Cluster) -> None:
    options = ["--batch", "16", "--data-dir", str(folder)]
    options += ["--steps", str(STEPS), "--eval-every", "12"]
    options += WAYS[way] if "--codec" in WAYS[way] else ["--codec", "3lc:s=1.0", *WAYS[way]]
    result = train_in(cluster, 5 if "server" in way else 4, options)
    report: dict[str, Any] = result.json
    (trained,) = report["results"]
    assert report["settings"]["workers"] == 4
    assert trained["replicas_identical"]
    assert len(trained["loss"]) == STEPS
    assert sum(trained["loss"][-4:]) < 0.99 * sum(trained["loss"][:4])
    every = report["settings"]["every"]
    assert [bits > 0 for bits in trained["push_bits"]] == [
        (step + 1) % every == 0 for step in range(STEPS)
    ]
    assert trained["hook_of_rank"][0]["steps"] == STEPS // every
    keeps_a_model = report["settings"]["exchange"] == "server"
    assert (trained["served"] is not None) == keeps_a_model
    assert f"exchange   {report['settings']['exchange']}, every " in result.err
    # With 4 workers, a broadcast sends twice the bytes of an exchange with owners.
    assert trained["ratio"] > (2 if way == "broadcast" else 4)
    if way == "broadcast":
        assert trained["pull_bits"] == [0.0] * STEPS
        assert all(4 < bits < 6 for bits in trained["push_bits"])
    for leg in ("push",) if way == "broadcast" else ("push", "pull"):
        assert 0 < trained[f"{leg}_payload_bits"] < 8.1


STREAMED = {
    "streaming": (
        *("--exchange", "sharded", "--codec", "3lc:s=1.0", "--fragments", "2", "--delay", "3"),
        *("--mix", "0.5", "--outer", "nesterov", "--outer-lr", "0.3"),
    ),
    "SparseLoCo": (
        *("--exchange", "broadcast", "--codec", "topk2bit:density=0.1"),
        *("--outer", "sgd", "--residual-decay", "0.9"),
    ),
}


@pytest.mark.parametrize("way", STREAMED)
def test_streaming_workers_agree_at_the_end(way: str, folder: Path, cluster: Cluster) -> None:
    options = ["--batch", "16", "--data-dir", str(folder), "--steps", "20", "--every", "4"]
    result = train_in(cluster, 3, [*options, "--eval-every", "12", *STREAMED[way]])
    (trained,) = result.json["results"]
    assert trained["replicas_identical"]
    assert sum(trained["loss"][-4:]) < 0.99 * sum(trained["loss"][:4])
    turns = [[bits > 0 for bits in trained["push_bits"][step : step + 4]] for step in (8, 12)]
    # The fragments have their turns after 2 and 4 steps, and are applied then.
    assert turns == [[step in (1, 3) if way == "streaming" else step == 3 for step in range(4)]] * 2
    exchanges = trained["hook_of_rank"][0]["steps"]
    assert exchanges == (12 if way == "streaming" else 5), "synchronize exchanges what is left"
    said = {
        "streaming": "every 4 steps, local ones between, of updates, 2 fragments, applied 3 steps "
        "later, mix 0.5, outer nesterov, learning rate 0.3",
        "SparseLoCo": "outer sgd, learning rate 1, residuals decay by 0.9",
    }
    assert said[way] in result.err


@pytest.mark.parametrize("way", ["sharded", "sharded-optimizer", "server", "local steps"])
def test_the_last_layer_goes_raw(way: str, folder: Path, cluster: Cluster) -> None:
    options = ["--batch", "2", "--data-dir", str(folder), "--steps", "4", "--eval-every", "4"]
    options += ["--codec", "int8", "--exclude-last", "1", *WAYS[way]]
    result = train_in(cluster, 3, options)
    (trained,) = result.json["results"]
    raw = {t["name"]: t["reason"] for t in trained["hook_of_rank"][0]["raw_tensors"]}
    excluded = [name for name, reason in raw.items() if reason.startswith("excluded by '")]
    (layer,) = {name.rpartition(".")[0] for name in excluded}
    assert f"{layer}.weight" in excluded
    assert result.json["settings"]["exclude_last"] == 1


def test_servers_go_on_without_the_last_worker(folder: Path, cluster: Cluster) -> None:
    options = ["--batch", "16", "--data-dir", str(folder), "--steps", "12", "--eval-every", "6"]
    options += ["--exchange", "server", "--servers", "2", "--backup-workers", "1"]
    result = train_in(cluster, 5, [*options, "--codec", "ddp", "--codec", "3lc:s=1.0"])
    plain, served = result.json["results"]
    assert plain["hook_of_rank"][3:] == [None] * 2  # the servers have nothing to do there
    assert served["replicas_identical"]
    assert len(served["loss"]) == len(served["push_bits"]) == 12
    assert [evaluation["step"] for evaluation in served["evaluations"]][-1] == 12
    workers, servers = served["hook_of_rank"][:3], served["hook_of_rank"][3:]
    assert [hook["role"] for hook in servers] == ["server", "server"]
    # A version lacks pushes that a server dropped, or that a worker never computed.
    dropped = sum(sum(hook["dropped_pushes"].values()) for hook in servers)
    taken = sum(hook["steps"] for hook in workers)
    # Pushes that workers held back from servers that were ahead.
    held_back = sum(sum(hook["dropped_pushes"].values()) for hook in workers)
    assert 12 * 2 <= taken <= 12 * 3
    assert 2 * taken - held_back - dropped == 2 * 12 * 2
    assert ("were dropped: none" in result.err) == (dropped == 0)


def test_rivals_train_as_pytorch_has_them(folder: Path, cluster: Cluster) -> None:
    options = ["--batch", "8", "--steps", "6", "--eval-every", "3", "--data-dir", str(folder)]
    codecs = ["ddp", "torch:bf16", "torch:fp16", "torch:powersgd:rank=1,start=2"]
    options += [word for codec in codecs for word in ("--codec", codec)]
    plain, *others = train_in(cluster, 2, options).json["results"]
    assert plain["push_bits"] == [32.0] * 6
    for rival in others:
        assert rival["replicas_identical"]
        assert [hook["steps"] for hook in rival["hook_of_rank"]] == [6, 6]
        assert rival["loss"][0] == pytest.approx(plain["loss"][0], abs=1e-6)
        assert rival["loss"] != plain["loss"]
        assert rival["loss"] == pytest.approx(plain["loss"], rel=0.1)
    bf16, fp16, power_sgd = (rival["push_bits"] for rival in others)
    assert bf16 == fp16 == [16.0] * 6
    assert power_sgd[:2] == [32.0] * 2
    shapes = [(6, 25), (16, 150), (120, 400), (84, 120), (10, 84)]
    sent = 61_706 - sum(n * m - n - m for n, m in shapes)
    assert power_sgd[2:] == pytest.approx([32 * sent / 61_706] * 4)


def test_power_sgd_trains_a_model_of_several_buckets(folder: Path, cluster: Cluster) -> None:
    """With DDP's own buckets, Gloo aborts the ranks of a model above 1 MB, such as mlp."""
    options = ["--model", "mlp", "--width", "512", "--batch", "2", "--data-dir", str(folder)]
    options += ["--steps", "12", "--eval-every", "12", "--codec", "torch:powersgd:rank=1,start=2"]
    (trained,) = train_in(cluster, 4, options).json["results"]
    assert trained["replicas_identical"]
    assert len(trained["loss"]) == 12


def test_every_codec_trains(folder: Path, cluster: Cluster) -> None:
    options = ["--batch", "8", "--steps", "2", "--eval-every", "2", "--data-dir", str(folder)]
    options += [word for codec in CODECS for word in ("--codec", codec)]
    results = {result["codec"]: result for result in train_in(cluster, 2, options).json["results"]}
    assert list(results) == CODECS
    for codec, result in results.items():
        assert result["replicas_identical"], codec
        assert all(map(math.isfinite, result["loss"])), codec


HERE = TrainSettings(
    workers=2, batch=6, seed=3, exchange="one-process", bandwidth=None, codecs=("raw",)
)
UPDATES = replace(HERE, optimizer="adamw", compress="updates", clip=0.5, weight_decay=0.1)
AVERAGES = replace(HERE, exchange="one-process:pulls=gradients", clip=0.5)
IN_ONE_PROCESS = {
    "changes of a server's model": (HERE, "3lc:s=1.00,coder=rice"),
    "gradients of two steps": (replace(HERE, every=2, exclude_last=2), "int8"),
    "averages": (AVERAGES, "raw/inceptionn:bound=6,mode=strict"),
    "codecs that are chosen": (HERE, "auto:bits=1"),
    "updates": (UPDATES, "3lc:s=1.00,coder=rice"),
    "updates of two steps": (replace(UPDATES, every=2), "raw"),
    "a gate": (
        replace(UPDATES, every=2, gate="bfloat16", outer="nesterov", fragments=2),
        GATED_CODEC,
    ),
    "plain": (replace(HERE, rules=(Rule("fc*", "int8"),)), "ddp"),
    "rules": (replace(HERE, rules=(Rule("fc*", "onebit:bucket=8"),)), "int8"),
}


def lenet() -> nn.Module:
    return models.build("lenet", 1, 28, 10, seed=3)


def train_rank(settings: TrainSettings) -> list[list[float]]:
    """The parameters after some steps; none on a server."""
    torch.set_num_threads(1)
    rank, workers, (codec,) = dist.get_rank(), settings.workers, settings.codecs
    group = dist.new_group(list(range(workers)))
    if settings.is_server(rank):
        strategies.serve(lenet(), codec, settings)
        return []
    strategy = strategies.choose(lenet(), codec, settings, group)
    strategy.loss_scale = settings.loss_scale
    draws = torch.Generator().manual_seed(3)
    for _ in range(4):
        images = torch.randn(12, 1, 28, 28, generator=draws)
        labels = torch.randint(10, (12,), generator=draws)
        for parameters in strategy.optimizer.param_groups:
            parameters["lr"] = 0.01 / settings.loss_scale
        strategy.take_step(images.chunk(workers)[rank], labels.chunk(workers)[rank])
    strategy.finish()
    weights = [weight.flatten().tolist() for weight in strategy.weights()]
    strategy.close()
    return weights


@pytest.mark.filterwarnings("ignore::gradwire.torch.errors.CoarseGradientsWarning")
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_one_process_trains_as_ranks_do(name: str, cluster: Cluster) -> None:
    given, codec = IN_ONE_PROCESS[name]
    settings = given.of_run(Run(codec, given.seed)).of_ranks()
    assert not settings.in_one_process
    here = loopback.run(settings.ranks, lambda rank: train_rank(settings))
    assert here == cluster.run(settings.ranks, train_rank, settings)
    assert here[0] == here[1] != [weight.flatten().tolist() for weight in lenet().parameters()]


def test_more_servers_than_tensors_are_refused_before_the_first_run(folder: Path) -> None:
    given = data.load("fashion-mnist", folder)

    def measure(servers: int, barrier: Literal["step", "tensor"]) -> dict[str, Any]:
        chosen = TrainSettings(exchange="server", servers=servers, barrier=barrier, batch=4)
        return Trainer(chosen, given, 0, None, torch.device("cpu")).measure_speed()

    with pytest.raises(TrainError, match=r"--servers: .* the model has 10: take 10 or fewer"):
        measure(11, "tensor")
    assert measure(10, "tensor")["parameters"] == measure(11, "step")["parameters"] > 0


def test_a_scale_of_the_loss_is_taken_back_by_the_step() -> None:
    """A power of two changes no bit of the model, but the gradients that a codec sees."""

    def trained(scale: float, codec: str) -> list[list[float]]:
        chosen = replace(AVERAGES, clip=0.0, loss_scale=scale, weight_decay=0.25)
        return loopback.run(3, lambda rank: train_rank(chosen.of_run(Run(codec, 3)).of_ranks()))[0]

    assert trained(32.0, "raw") == trained(1.0, "raw")
    assert trained(32.0, "inceptionn:bound=6") != trained(1.0, "inceptionn:bound=6")


def test_a_run_whose_evaluation_is_not_finite_diverged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that breaks down in a step is evaluated before its next loss says so."""
    values = iter([2.5, 2.0, math.inf])
    monkeypatch.setattr(Trainer, "_value", lambda *_: next(values))
    settings, given = replace(HERE, steps=8, eval_every=2), data.load("fashion-mnist", folder)
    trainer = Trainer(settings, given, 0, None, torch.device("cpu"))
    first, second, _ = trainer.run(Run("ddp", 3), lambda event: None)
    assert (first.diverged, len(first.losses), len(second.losses)) == (6, 6, 6)
    assert [(e.step, e.value) for e in first.evaluations] == [(2, 2.5), (4, 2.0)]


def take_rank_0s_place(folder: str) -> str:
    """Rank 0 is a stranger who sends a pickle that makes a folder, as broadcast_object_list does.
    Returns what the other rank does with it."""
    pickle = f"cos\nmkdir\n(S'{folder}'\ntR.".encode()
    content = torch.frombuffer(bytearray(pickle), dtype=torch.uint8)
    if dist.get_rank() > 0:
        try:
            return str(messages.broadcast([]))
        except TrainError as error:
            return str(error)
    dist.broadcast(torch.tensor(content.numel()), 0)
    dist.broadcast(content, 0)
    return ""


def state_too_much() -> str:
    if dist.get_rank() > 0:
        try:
            return str(messages.broadcast([]))
        except TrainError as error:
            return str(error)
    dist.broadcast(torch.tensor(1 << 60), 0)
    return ""


def test_a_pickle_of_a_stranger_does_not_run(cluster: Cluster, tmp_path: Path) -> None:
    """Whoever reaches the store of torchrun's ranks can take rank 0's place."""
    _, said = cluster.run(2, take_rank_0s_place, str(tmp_path / "ran"))
    assert "sent something that is no JSON" in said
    assert not (tmp_path / "ran").exists()
    _, said = cluster.run(2, state_too_much)
    assert "states a message of 1152921504606846976 bytes" in said
