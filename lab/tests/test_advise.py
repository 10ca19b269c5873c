"""`gradwire.torch.advise` and `gradwire probe`: a plan for the ranks that ask for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.optim import AdamW

from cli_runner import run
from gradwire.local_schedule import Schedule
from gradwire.torch import advise, loopback
from gradwire_lab.plan import here, links
from gradwire_lab.plan.advise import make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.fit import LOCAL
from gradwire_lab.plan.links import Links
from gradwire_lab.plan.measure import gradients_of, measure_codec
from gradwire_lab.plan.other_work import OtherWork
from gradwire_lab.plan.profile import CodecSpeed, Layer, PlanError, Profile
from gradwire_lab.plan.trial import Trial

_TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
_PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
import gradwire.torch as gt
import gradwire
from gradwire.errors import sends_late
from gradwire_lab.plan.advise import make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.here import _lines
from gradwire_lab.plan.profile import PlanError
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.BatchNorm1d(256), nn.Linear(256, 8))
before = [value.clone() for value in model.state_dict().values()]
inputs, labels = torch.randn(32, 64), torch.randint(8, (32,))

def step(module):
    nn.functional.cross_entropy(module(inputs), labels).backward()

codecs = ("bf16", "3lc:s=1.00,coder=rice")
options = {"codecs": codecs, "ranks_per_machine": 1, "every": 3}
advice = gt.advise(model, step, torch.optim.AdamW(model.parameters()), **options)
assert all(map(torch.equal, before, model.state_dict().values()))
assert all(p.grad is None for p in model.parameters())
adamw = torch.optim.AdamW(model.parameters())
seldom = gt.advise(model, step, adamw, every=8, ranks_per_machine=1)
rows = {p.codec for p in seldom.plan.predictions} - {"ddp"}
assert "qsgd:bits=4" in rows and not any(map(sends_late, rows)), rows
for optimizer, schedule in ((None, None), (adamw, None), (adamw, gt.Schedule(3))):
    plan = make_plan(advice.profile, Cluster(2, 1e5), codecs, schedule=schedule)
    names = {"gradwire": gradwire, "optimizer": optimizer, "model": model}
    if optimizer is None:
        names["model"] = nn.parallel.DistributedDataParallel(model)
    exec("\\n".join(_lines(plan, optimizer)), names)
    for _ in range(4):
        step(names["model"])
        if optimizer is not None:
            names["optimizer"].step()
    exchanging = names["optimizer"] if optimizer else names["state"]
    stats = exchanging.stats()
    assert (stats.exchanges if optimizer else stats).push_bytes > 0
    exchanging.close()
for wrong, steps in ((step, 0), (step, 3), (lambda module: None, 4)):
    try:
        gt.advise(model, wrong, codecs=codecs, steps=steps)
    except PlanError as error:
        # At once, or the lines of the two ranks mix.
        sys.stdout.write(f"refused: {type(error).__name__} {error}\\n")
if dist.get_rank() == 0:
    advice.show()
    print("codecs", sorted(advice.profile.codecs), advice.profile.workers)
dist.destroy_process_group()
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *_TORCHRUN, "--rdzv-endpoint=127.0.0.1:0", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )


def test_a_program_gets_a_plan_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ended = torchrun(str(program))
    assert ended.returncode == 0, ended.stderr
    assert "links: 2 ranks, 1 on each machine; between machines" in ended.stdout
    assert "codecs ['3lc:s=1.00,coder=rice', 'bf16'] 2" in ended.stdout
    assert " sharded every 3 steps " in ended.stdout
    assert "sends many changes late" not in ended.stderr
    assert ended.stdout.count("refused: PlanError a profile needs more than 3 steps") == 4
    assert ended.stdout.count("refused: PlanError no gradient came for 0.weight, 0.bias") == 2
    for row in (" ddp ", " bf16 ", " 3lc:s=1.00,coder=rice "):
        assert row in ended.stdout


_FAST_LINKS = """
import time, torch, torch.distributed as dist
from torch import nn
from gradwire.torch import advise
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
inputs = torch.randn(8, 16)

def step(module):
    time.sleep(0.05)  # a step that computes for long, in no core that others want
    module(inputs).square().mean().backward()

for optimizer in (None, torch.optim.AdamW(model.parameters())):
    for _ in range(5):  # on a busy machine messages may take as long as the step
        advice = advise(model, step, optimizer, ranks_per_machine=1)
        is_slow = advice.plan.baseline.seconds >= 1.3 * advice.profile.compute_seconds
        again = torch.tensor(float(advice.plan.pays or is_slow))
        dist.all_reduce(again)
        if not again:
            break
    assert not advice.plan.pays and advice.plan.choice is advice.plan.baseline
    assert advice.lines == ()
    assert 0 <= advice.profile.how["cores_of_others"] < 1e3
    if dist.get_rank() == 0:
        print(advice)
dist.destroy_process_group()
"""


def test_where_nothing_pays_it_says_so(tmp_path: Path) -> None:
    """A tiny model over the loopback."""
    program = tmp_path / "program.py"
    program.write_text(_FAST_LINKS)
    ended = torchrun(str(program))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("do not compress: a step of DDP takes ") == 2
    assert "optimizer = " not in ended.stdout
    assert "register_comm_hook" not in ended.stdout


def test_work_of_others_is_measured_and_said() -> None:
    """A process beside the ranks keeps a core busy."""

    busy = "import time\nend = time.perf_counter() + 1.5\nwhile time.perf_counter() < end: pass"
    begun = loopback.run(1, lambda rank: OtherWork())[0]
    with subprocess.Popen([sys.executable, "-c", busy]):
        time.sleep(1.0)
        (cores,) = loopback.run(1, lambda rank: begun.cores())
    assert cores > 0.3
    machine = {"cores": 2}
    profile = replace(_slow_network()[0], how={"machine": machine, "cores_of_others": cores})
    said = make_plan(profile, _slow_network()[1]).advice()
    assert "In doubt: other work kept the machine busy" in said
    quiet = replace(profile, how={"machine": machine, "cores_of_others": 0.1})
    assert "other work" not in make_plan(quiet, _slow_network()[1]).advice()


def test_the_command_measures_the_links_of_torchrun() -> None:
    ended = torchrun("-m", "gradwire", "probe", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ranks"], found["ranks_per_machine"], found["bandwidth"]) == (2, 2, None)
    assert found["local_bandwidth"] > 1e6
    assert 0 < found["local_latency"] < 1


def test_the_command_needs_ranks() -> None:
    ended = run("probe")
    assert ended.code == 1
    assert "there are no ranks: start this on each machine with torchrun" in ended.err


def test_a_single_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="a single rank has no links"):
        loopback.run(1, lambda rank: links.probe())


def test_machines_are_counted_by_torchrun_or_by_host_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert loopback.run(4, lambda rank: links._count_ranks_here()) == [4] * 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert loopback.run(4, lambda rank: links._count_ranks_here()) == [2] * 4


def test_links_become_the_network_of_a_plan() -> None:
    found = Links(4, 2, 1e8, 0.021, 2.13456e10, 0.0001, 12_500)
    cluster = found.cluster(message_seconds=0.0005)
    assert (cluster.ranks, cluster.machines, cluster.bandwidth) == (4, 2, 1e8)
    assert cluster.burst == 12_500
    assert cluster.latency == pytest.approx(0.02)
    said = (
        "4 ranks, 2 on each machine; between machines 100 Mbit/s, 21 ms, 12500 bytes at once; "
        "inside 21350 Mbit/s"
    )
    assert said in found.describe()


def test_local_steps_need_the_optimizer() -> None:
    with pytest.raises(PlanError, match=r"every=4 needs the optimizer, which LocalSteps wraps"):
        advise(nn.Linear(1, 1), lambda module: None, every=4)


def test_codecs_are_timed_on_a_share_of_each_tensor() -> None:
    model = nn.ParameterDict({"a": torch.zeros(1000, 900), "b": torch.zeros(10)})
    for parameter in model.values():
        parameter.grad = torch.randn_like(parameter)
    gradients = gradients_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "_SAMPLED", 90_000)
        sample = here._sample(gradients)
    assert {name: values.size for name, values in sample.items()} == {"a": 90_000, "b": 1}
    assert here._sample(gradients) is gradients
    speed = measure_codec("3lc:s=1.00,coder=rice", [sample])
    assert 0.1 < speed.bits < 4
    assert speed.encode_seconds > 0


def test_lines_to_paste_suit_the_optimizer() -> None:
    """Where the network is slow; an adaptive optimizer gets LocalSteps."""
    layer = nn.Linear(8, 8)
    plan = make_plan(*_slow_network())
    assert plan.pays
    hook = here._lines(plan, None)
    assert hook[1].startswith("state = gradwire.torch.GradwireState(codec='3lc")
    local = here._lines(plan, [AdamW(layer.parameters())])
    assert local[-1].startswith(
        "optimizer = gradwire.torch.LocalSteps(optimizer, model, codec='3lc"
    )


def test_local_steps_are_predicted_and_recommended() -> None:
    """With an exchange every 4 steps, any optimizer gets LocalSteps."""
    profile, cluster = _slow_network()
    every_step = make_plan(profile, cluster)
    plan = make_plan(profile, cluster, schedule=Schedule(4))
    assert {p.every for p in plan.predictions if p is not plan.baseline} == {4}
    sent = {p.sent_bytes for p in plan.predictions if p.exchange == "sharded"}
    assert sent == {p.sent_bytes / 4 for p in every_step.predictions if p.exchange == "sharded"}
    note, line = here._lines(plan, None)
    assert "train in another way than DDP" in note
    assert line.startswith("optimizer = gradwire.torch.LocalSteps(optimizer, model, codec='3lc")
    assert line.endswith(", every=4)")


def _slow_network() -> tuple[Profile, Cluster]:
    speed = CodecSpeed(encode_seconds=1e-9, decode_seconds=1e-9, bits=0.5, pull_bits=0.5)
    layers = (Layer("weight", (1000, 1000), 0.01),)
    profile = Profile("m", 2, 0.01, 0.0, layers, {"3lc:s=1.00,coder=rice": speed})
    return profile, Cluster(2, 1e7)


def test_without_the_laboratory_advise_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gradwire_lab.plan.here", None)
    with pytest.raises(ModuleNotFoundError, match=r"gradwire-lab.* is not installed.*\./lab"):
        advise(nn.Linear(1, 1), lambda module: None)


def test_models_whose_tensors_all_go_raw_and_sparse_gradients_are_measured() -> None:
    small = nn.Linear(10, 1)
    small(torch.ones(2, 10)).sum().backward()
    assert measure_codec("3lc", [gradients_of(small)]) == CodecSpeed(0.0, 0.0, 32.0, 32.0)
    rows = nn.Embedding(5, 2, sparse=True)
    rows(torch.tensor([1, 1])).sum().backward()
    assert gradients_of(rows)["weight"].tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [0, 0]]


class _HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


class _WithoutTruth(nn.Linear):
    """As a compiled model is."""

    def __bool__(self) -> bool:
        raise TypeError("it has no truth value")


def _try_steps(model: nn.Module) -> dict[str, list[float]]:
    """Steps of each kind, in a world of one rank."""

    def take(rank: int) -> dict[str, list[float]]:
        def step(module: nn.Module) -> None:
            module(torch.ones(2, 4)).sum().backward()

        with closing(Trial(model, step, AdamW(model.parameters()), 1)) as trial:
            trial.take_alone(4)
            return trial.take({LOCAL: 2})

    (seconds,) = loopback.run(1, take)
    return seconds


def test_a_parameter_that_a_part_of_the_steps_leaves_out_is_named() -> None:
    with pytest.raises(PlanError, match=r"no gradient came for unused\.weight, unused\.bias"):
        _try_steps(_HalfUsed())


def test_a_model_without_a_truth_value_is_measured() -> None:
    assert len(_try_steps(_WithoutTruth(4, 4))[LOCAL]) == 2
