"""The functions that the ranks of a test cluster run."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.choice import Chooser
from gradwire.torch import (
    Compression,
    GradwireState,
    LocalSteps,
    Overlap,
    PerRank,
    ShardedOptimizer,
    gradwire_hook,
)
from gradwire.torch.errors import (
    CoarseGradientsWarning,
    GrowingScalesWarning,
    NonFiniteStepWarning,
    OutgrownResidualWarning,
    UnmatchedPatternWarning,
)
from gradwire.torch.network.transport import Kind, Limits, Received
from gradwire.torch.network.wire import Wire
from gradwire.torch.options import grouped
from gradwire.torch.stats import ChosenCodec
from training import (
    Options,
    Trained,
    batch,
    digest,
    load,
    make_model,
    make_optimizer,
    save,
    train,
)

Owed = dict[str, dict[str, np.ndarray]]


def train_each(all_options: list[Options]) -> list[Trained]:
    return [train(options) for options in all_options]


def train_and_signal(options: Options, victim: int, at_step: int, number: int) -> None:
    """The victim sends itself a signal (SIGKILL, SIGSTOP) before a step."""

    def on_step(step: int) -> None:
        if dist.get_rank() == victim and step == at_step:
            os.kill(os.getpid(), number)

    train(options, on_step)


def train_unlike(options_by_rank: list[Options]) -> Trained:
    return train(options_by_rank[dist.get_rank()])


def train_with_buffers_and_lose_a_rank(victim: int, at_step: int) -> str:
    """DDP broadcasts buffers before each forward, so it may notice the lost rank first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    ddp = DistributedDataParallel(model)
    state = GradwireState()
    ddp.register_comm_hook(state, gradwire_hook)
    try:
        for step in range(100):
            if dist.get_rank() == victim and step == at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            ddp(torch.randn(4, 8)).sum().backward()
            time.sleep(0.05)
    except RuntimeError as error:
        raise state.explain(error) from error
    return "nobody was lost"


def see_pytorchs_error_before_a_rank_is_gone(victim: int) -> str:
    """PyTorch's own connection to a process that ends may close long before gradwire's."""
    model = nn.Linear(8, 2)
    ddp = DistributedDataParallel(model)
    state = GradwireState()
    ddp.register_comm_hook(state, gradwire_hook)
    ddp(torch.randn(4, 8)).sum().backward()
    dist.barrier()
    if dist.get_rank() == victim:
        time.sleep(0.3)
        os._exit(3)
    return str(state.explain(RuntimeError("Connection closed by peer")))


def wait_elsewhere_for_a_stopped_rank(victim: int, seconds: float) -> str:
    """The ranks sum over a group of the program, whose timeout is shorter than gradwire's."""
    model = nn.Linear(8, 2)
    ddp = DistributedDataParallel(model)
    state = GradwireState()
    ddp.register_comm_hook(state, gradwire_hook)
    ddp(torch.randn(4, 8)).sum().backward()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as error:
        raise state.explain(error) from error
    return "nobody waited in vain"


@dataclass
class Scaled:
    """A training with a gradient scaler, seen from one rank. Lists have an entry for each step."""

    digests: list[str]  # parameters after the step
    scales: list[float]  # of the loss
    own: list[dict[str, np.ndarray]]  # this rank's scaled gradient
    averaged: list[dict[str, np.ndarray]]  # the average that the hook returned
    owed: list[Owed]  # residuals before the step; one more entry after the last
    skipped: list[bool]  # from last_step()
    skipped_steps: int
    warnings: list[str]
    losses: list[float] = field(default_factory=list)
    chosen: list[tuple[ChosenCodec, ...]] = field(default_factory=list)  # before the step


def train_scaled(
    steps: int, infinite_step: int, infinite_name: str, state_options: dict[str, Any]
) -> Scaled:
    """In one step the last rank has an infinite gradient for one parameter."""
    rank = dist.get_rank()
    model = make_model()
    alone = make_model()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    state = GradwireState(scaler=scaler, **grouped(state_options))
    ddp.register_comm_hook(state, gradwire_hook)
    result = Scaled([], [], [], [], [], [], 0, [])

    def make_infinite(gradient: torch.Tensor) -> torch.Tensor:
        if step == infinite_step and rank == dist.get_world_size() - 1:
            gradient = gradient.clone()
            gradient.view(-1)[3] = float("inf")
        return gradient

    model.get_parameter(infinite_name).register_hook(make_infinite)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            inputs, labels = batch(rank, step)
            result.scales.append(scaler.get_scale())
            result.owed.append(owed(state))
            result.chosen.append(state.stats().chosen)
            alone.load_state_dict(model.state_dict())
            alone.zero_grad()
            scaler.scale(nn.functional.cross_entropy(alone(inputs), labels)).backward()
            result.own.append(gradients(alone))
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(ddp(inputs), labels)).backward()
            result.averaged.append(gradients(model))
            scaler.step(optimizer)
            scaler.update()
            result.digests.append(digest(model))
            result.skipped.append(state.last_step()["skipped"])
        result.owed.append(owed(state))
    result.skipped_steps = state.stats().skipped_steps
    result.warnings = [str(w.message) for w in caught if w.category is NonFiniteStepWarning]
    return result


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: p.grad.flatten().numpy().copy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def owed(state: GradwireState) -> Owed:
    """Residuals of this rank by kind and parameter name, flattened, up to the last known value."""
    return owed_in(state.state_dict())


def owed_in(state: dict[str, Any]) -> Owed:
    result: Owed = {"push": {}, "owed": {}, "pull": {}}
    for entry in state["residuals"]:
        values = entry["values"].double().numpy()
        kept = result[entry["kind"]].get(entry["name"], np.zeros(0))
        end = entry["offset"] + values.size
        if kept.size < end:
            kept = np.concatenate([kept, np.zeros(end - kept.size)])
        kept[entry["offset"] : end] += values
        result[entry["kind"]][entry["name"]] = kept
    return result


def total_owed(ranks: list[Owed]) -> dict[str, np.ndarray]:
    """The amount owed to each parameter: mean of the push residuals, or what all ranks owe together
    and is equal on each, plus the pull residual."""
    names = {name for rank in ranks for kind in rank.values() for name in kind}
    size = {n: max(k[n].size for rank in ranks for k in rank.values() if n in k) for n in names}
    total = {name: np.zeros(size[name]) for name in names}
    for rank in ranks:
        for kind, share in (("push", 1 / len(ranks)), ("owed", 1 / len(ranks)), ("pull", 1.0)):
            for name, values in rank[kind].items():
                total[name][: values.size] += share * values
    return total


def check_nothing_is_lost(ranks: list[Scaled], step: int) -> None:
    """Owed before + mean gradient = owed after + applied, all at one scale."""
    # `owed` was read before the hook noticed the new scale.
    factor = ranks[0].scales[step] / ranks[0].scales[step - 1]
    before = total_owed([rank.owed[step] for rank in ranks])
    after = total_owed([rank.owed[step + 1] for rank in ranks])
    for name, value in before.items():
        mean = np.mean([rank.own[step][name].astype(np.float64) for rank in ranks], axis=0)
        expected = value * factor + mean
        found = after[name] + ranks[0].averaged[step][name]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * abs(expected).max())


@dataclass
class Placed:
    """Residuals after a step with zero gradients, and what that step applied."""

    state: dict[str, Any]
    applied: dict[str, np.ndarray]


def place_residuals(options: Options) -> Placed:
    """Loads saved residuals into a fresh hook and lets it take one step that adds nothing."""
    assert options.residuals is not None
    assert options.state is not None
    model = make_model()
    ddp = DistributedDataParallel(model, **options.ddp)
    state = GradwireState(**grouped(options.state))
    state.load_state_dict(load(options.residuals[dist.get_rank()]))
    ddp.register_comm_hook(state, gradwire_hook)
    (0.0 * ddp(batch(0, 0)[0]).sum()).backward()
    return Placed(load(save(state.state_dict())), gradients(model))


@dataclass
class Counted:
    """A training, and the messages on this rank's wire during it."""

    trained: Trained
    sent: dict[str, int]  # bytes of pushes, pulls and hellos
    messages: int
    received: int  # bytes of packets


def train_and_count(all_options: list[Options]) -> list[Counted]:
    return [_count(options) for options in all_options]


def _count(options: Options) -> Counted:
    counted = Counted(None, {"push": 0, "pull": 0, "hello": 0}, 0, 0)  # type: ignore[arg-type]
    send, receive = Wire.send, Wire.receive

    def counting_send(wire: Wire, peer: int, kind: Kind, payload: np.ndarray) -> None:
        what = "hello" if kind is Kind.HELLO else gradwire.inspect(payload)["direction"]
        counted.sent[what] += payload.size
        counted.messages += 1
        send(wire, peer, kind, payload)

    def counting_receive(wire: Wire, peer: int, limits: Limits) -> Received:
        received = receive(wire, peer, limits)
        counted.received += received.payload.size if received.kind is Kind.PACKET else 0
        return received

    with mock.patch.multiple(Wire, send=counting_send, receive=counting_receive):
        counted.trained = train(options)
    return counted


@dataclass
class Timed:
    """Seconds from the beginning of the step, for each bucket and for the end of backward."""

    hook_called: list[float]
    hook_returned: list[float]
    done: list[float]
    backward_ended: float


def time_buckets(
    overlap: Overlap, late_rank: int, late_seconds: float, slow_seconds: float
) -> Timed:
    """One step in which a rank is late, and backward sleeps before its last bucket is full."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.07)
    state = GradwireState(start_iter=0, overlap=overlap)
    called: list[float] = []
    returned: list[float] = []

    def timed_hook(state, bucket):  # type: ignore[no-untyped-def]
        called.append(time.perf_counter())
        future = gradwire_hook(state, bucket)
        returned.append(time.perf_counter())
        return future

    ddp.register_comm_hook(state, timed_hook)
    for step in range(3):
        output = ddp(torch.ones(4, 128))
        if step == 2:
            dist.barrier()
            model.get_parameter("1.weight").register_hook(lambda _: time.sleep(slow_seconds))
            if dist.get_rank() == late_rank:
                time.sleep(late_seconds)
            called.clear()
            returned.clear()
        begin = time.perf_counter()
        output.sum().backward()
        end = time.perf_counter()
    done = [bucket.finished - begin for bucket in state.last_step()["buckets"]]
    return Timed([at - begin for at in called], [at - begin for at in returned], done, end - begin)


def close_and_go_on() -> tuple[bool, bool, str]:
    """A closed state keeps its statistics and residuals, but takes no step."""
    ddp = DistributedDataParallel(make_model())
    state = GradwireState(start_iter=0)
    ddp.register_comm_hook(state, gradwire_hook)
    ddp(batch(0, 0)[0]).sum().backward()
    stats, residuals = state.stats(), save(state.state_dict())
    state.close()
    same = state.stats() == stats, save(state.state_dict()) == residuals
    try:
        ddp(batch(0, 0)[0]).sum().backward()
    except RuntimeError as error:
        return *same, str(error)
    return *same, "it went on"


def warned_of_patterns() -> list[str]:
    """Warnings about patterns, of which some match a tensor of one bucket only."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(
            Options(
                steps=5,
                state={
                    "codec": "3lc",
                    "rules": [("last.*", "raw"), ("lost.*", "raw")],
                    "exclude": ["first.bias", "bias"],
                },
            )
        )
    return [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, UnmatchedPatternWarning)
    ]


def train_in_part(members: list[int]) -> str | None:
    """Two models at once, in a group of some of the ranks."""
    group = dist.new_group(members)
    result = _train_two_models(group) if dist.get_rank() in members else None
    dist.barrier()  # rank 0 has the store
    return result


def lose_a_rank_of_a_part(members: list[int], victim: int, how: str) -> list[str]:
    """how: "killed" is the victim, or it has another "codec" than the others, or in the fifth step
    "nan" in its data. Returns the warnings of that."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return []
    is_victim = dist.get_rank() == victim
    codec = "int8" if is_victim and how == "codec" else "3lc"
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(GradwireState(codec, process_group=group), gradwire_hook)
    optimizer = make_optimizer(model)
    with warnings.catch_warnings(record=True) as caught:
        for step in range(5 if how == "nan" else 1000):
            if step == 4 and is_victim and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            inputs, labels = batch(dist.get_rank(), step)
            if step == 4 and is_victim and how == "nan":
                inputs[0, 0] = math.nan
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    return [str(w.message) for w in caught if w.category is NonFiniteStepWarning]


def _train_two_models(group: dist.ProcessGroup) -> str:
    models = [make_model(), make_model()]
    ddps = [DistributedDataParallel(m, process_group=group, bucket_cap_mb=0.05) for m in models]
    states = [GradwireState(codec, process_group=group) for codec in ("3lc:s=1.75", "bf16")]
    for ddp, state in zip(ddps, states, strict=True):
        ddp.register_comm_hook(state, gradwire_hook)
    optimizers = [make_optimizer(model) for model in models]
    for step in range(5):
        inputs, labels = batch(dist.get_rank(), step)
        for ddp, optimizer in zip(ddps, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    assert digest(models[0]) != digest(models[1])
    return digest(models[0]) + digest(models[1])


def misuse(what: str) -> None:
    model: nn.Module = nn.Linear(4, 4)
    inputs = torch.ones(2, 4)
    if what == "sparse":
        model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
        inputs = torch.tensor([[1, 2], [3, 4]])
    if what == "float64":
        model, inputs = model.double(), inputs.double()
    ddp = DistributedDataParallel(model)
    state = GradwireState()
    ddp.register_comm_hook(state, gradwire_hook)
    if what == "shared state":
        other = DistributedDataParallel(nn.Linear(4, 4))
        other.register_comm_hook(state, gradwire_hook)
    ddp(inputs).sum().backward()


def misuse_groups() -> str:
    """What a rank says whose model averages over ranks 0 and 2, and whose state over all."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return ""
    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    ddp.register_comm_hook(GradwireState(), gradwire_hook)
    with pytest.raises((RuntimeError, ValueError)) as raised:  # PyTorch may wrap it
        ddp(torch.ones(2, 4)).sum().backward()
    return str(raised.value)


def train_and_note_decisions(options: Options) -> list[list[str]]:
    """The names of the tensors in each decision about `auto` codecs."""
    names: list[list[str]] = []
    decide = Chooser.decide

    def note(chooser: Chooser, rows: dict[str, Any], steps: int) -> bool:
        names.append(sorted(rows))
        return decide(chooser, rows, steps)

    with mock.patch.object(Chooser, "decide", note):
        train(options)
    return names


def train_and_note_growing_scales(options: Options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(options)
    return [str(w.message) for w in caught if w.category is GrowingScalesWarning]


def train_with(place: str, optimizer: str, codec: str) -> tuple[list[str], list[str]]:
    """Warnings of coarse gradients in 3 steps of torch.optim.`optimizer`; remarks of stats().

    place: "hook", "sharded" or "frozen": the hook, and most parameters, with int8, are frozen.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make_model()
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
        state: GradwireState | ShardedOptimizer
        forward: nn.Module = model
        if place == "sharded":
            state = steps = ShardedOptimizer(steps, model, codec)
        else:
            state = GradwireState(codec, start_iter=1)
            if place == "frozen":
                rules = [("first*", "int8"), ("second*", "int8")]
                state = GradwireState(codec, start_iter=1, compression=Compression(rules=rules))
                model.first.requires_grad_(False)
                model.second.requires_grad_(False)
            forward = DistributedDataParallel(model)
            forward.register_comm_hook(state, gradwire_hook)
        for step in range(3):
            steps.zero_grad()
            inputs, labels = batch(dist.get_rank(), step)
            nn.functional.cross_entropy(forward(inputs), labels).backward()
            steps.step()
    said = [str(w.message) for w in caught if w.category is CoarseGradientsWarning]
    return said, list(state.stats().remarks)


def train_with_too_much_owed(
    factor: float, residual: str = "f32"
) -> tuple[list[str], dict[str, Any]]:
    """The warnings and stats of 40 steps that begin with a residual of `second.weight`."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    state = GradwireState(f"topk:ratio=0.001,residual={residual}", start_iter=0)
    ddp.register_comm_hook(state, gradwire_hook)
    owed = torch.full((model.second.weight.numel(),), factor)
    piece = {"kind": "push", "name": "second.weight", "offset": 0, "values": owed}
    mine = [piece] if dist.get_rank() == 0 else []
    state.load_state_dict(state.state_dict() | {"residuals": mine, "ranks_per_machine": 1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(40):
            model.zero_grad()
            inputs, labels = batch(dist.get_rank(), step)
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
    said = [str(w.message) for w in caught if w.category is OutgrownResidualWarning]
    return said, state.stats().as_dict()


def refusals(all_arguments: list[dict[str, Any]]) -> list[str | None]:
    """The error of GradwireState for each of these arguments; None if it accepts them."""
    said: list[str | None] = []
    for arguments in all_arguments:
        try:
            GradwireState(**grouped(arguments))
        except ValueError as error:
            said.append(str(error))
        else:
            said.append(None)
    return said


def save_in_checkpoint(folder: str, options: dict[str, Any], residuals: list[bytes]) -> bytes:
    state = GradwireState(**grouped(options))
    state.load_state_dict(load(residuals[dist.get_rank()]))
    save_checkpoint({"gradwire": PerRank(state)}, checkpoint_id=folder)
    return save(state.state_dict())


def load_from_checkpoint(folder: str, options: dict[str, Any], saved_world_size: int) -> bytes:
    state = GradwireState(**grouped(options))
    saved = {"gradwire": PerRank(state, saved_world_size=saved_world_size)}
    load_checkpoint(saved, checkpoint_id=folder)
    assert list(saved["gradwire"].state_dict()) == [
        f"rank {dist.get_rank()} of {dist.get_world_size()}"
    ]
    return save(state.state_dict())


def why_not_loaded_without_per_rank(
    folder: str, options: dict[str, Any], residuals: list[bytes]
) -> str:
    """What a rank says whose states were saved under one name."""
    state = GradwireState(**grouped(options))
    state.load_state_dict(load(residuals[dist.get_rank()]))
    save_checkpoint({"gradwire": state}, checkpoint_id=folder)
    try:
        load_checkpoint({"gradwire": state}, checkpoint_id=folder)
    except (CheckpointException, ValueError) as error:
        return str(error)
    return ""


def why_not_loaded(folder: str, options: dict[str, Any]) -> str:
    try:
        load_from_checkpoint(folder, options, dist.get_world_size())
    except CheckpointException as error:
        return str(error)
    return ""


def local_steps_through_checkpoint(folder: str) -> tuple[str, str]:
    """The models after seven steps, without an interruption and with one after three."""
    digests = []
    for is_whole in (True, False):
        model = make_model()
        optimizer = LocalSteps(make_optimizer(model), model, codec="3lc:s=1.75", every=2)
        saved = {"model": PerRank(model), "optimizer": PerRank(optimizer)}
        for step in range(0 if is_whole else 3, 7):
            if step == 3:
                act = save_checkpoint if is_whole else load_checkpoint
                act(saved, checkpoint_id=folder)
            inputs, labels = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        digests.append(digest(model))
        optimizer.close()
    return digests[0], digests[1]
