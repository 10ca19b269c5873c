"""What is shared with the user's optimizer and module is looked at again in each step: whatever the
user does to them is followed, or refused in words that name the parameter and the remedy."""

from __future__ import annotations

import copy
import io
import pickle  # pickle: to show that it is refused
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from deeds import DEEDS, FOLLOWED, REFUSED, UNLIKE, Tied, loss_of, two_steps_after
from gradwire.contrib.qsvrg import QSVRG
from gradwire.torch import LocalSteps
from odd_optimizers import OPTIMIZERS, ScheduleFree, Sharp
from runs import said_by, threads
from ways import Program, Training, Way, build

RAW: dict[str, Any] = {"codec": "raw"}


def local(**options: Any) -> Way:
    return Way("local", RAW | options)


def served(**options: Any) -> Way:
    return Way("server", RAW | {"timeout": 20.0} | options, servers=1)


# All of them take the steps of the optimizer alone, if the ranks have the same data.
WAYS = {
    "local": local(),
    "local, every 2": local(every=2),
    "local, outer": local(outer=partial(SGD, lr=1.0)),
    "local, fragments": local(every=2, fragments=2),
    "sharded": Way("sharded", RAW),
    "sharded, owed": Way("sharded", {"codec": "int8:ef=on,bucket=8", "min_numel": 10**6}),
    "served": served(),
    "served by the tensor": served(barrier="tensor"),
    "served gradients": served(pulls="gradients"),
}
OF_SERVED = [
    *("nothing", "momentum cycled", "groups replaced", "parametrized", "edited", "frozen"),
    *("model loaded", "model loaded and back", "state loaded into the wrapped optimizer"),
    *("group added", "parameter replaced", "stepped itself", "gradients that have gradients"),
]
OF_REPLICAS = ["nothing", "model loaded", "edited", "scheduler of the wrapped optimizer"]
OF_ALL = [*FOLLOWED, *REFUSED]
DONE: dict[str, list[str]] = {
    "local": OF_ALL,
    "local, every 2": OF_REPLICAS,
    "local, outer": OF_REPLICAS,
    "local, fragments": OF_REPLICAS,
    "sharded": OF_ALL,
    "sharded, owed": OF_REPLICAS,
    "served": OF_SERVED,
    "served by the tensor": [
        *("nothing", "edited", "frozen", "group added", "parameter replaced", "model loaded"),
        *("model loaded and back", "gradients that have gradients"),
    ],
    "served gradients": [
        *("nothing", "edited", "model loaded", "group added", "gradients that have gradients"),
    ],
}


def refusal(way: str, deed: str) -> str | None:
    """Words of the error that must follow; None: there must be none."""
    if deed in REFUSED:
        return REFUSED[deed][1]
    kind = way if (way, deed) in UNLIKE else way.partition(",")[0]
    return UNLIKE.get((kind, deed)) if way != "served gradients" else None


def do(way: str | None, deed: str, rank: int) -> list[np.ndarray] | str | None:
    """The parameters of the model two steps after the deed, or the text of the error; None on a
    server. way: None: the optimizer alone."""
    inner = partial(SGD, lr=0.1, momentum=0.9)
    if way is None:
        training = Training(Way("alone"), Tied(), inner, Program())
    else:
        training = build(WAYS[way], Tied(), inner)
    found = two_steps_after(DEEDS[deed], training)
    if not isinstance(found, nn.Module):
        return found
    return [parameter.detach().numpy().copy() for parameter in found.parameters()]


@pytest.mark.parametrize("way", DONE)
def test_each_deed_is_followed_or_refused(way: str) -> None:
    """As the steps are those of the optimizer alone, it shows what follows from a deed."""
    for deed in DONE[way]:
        for found in threads(2, partial(do, way, deed)):
            if found is None:
                continue  # a server
            words = refusal(way, deed)
            if words is not None:
                assert isinstance(found, str), (deed, "nothing was said")
                assert words in found, deed
                continue
            assert not isinstance(found, str), (deed, found)
            (expected,) = threads(1, partial(do, None, deed))
            assert isinstance(expected, list)
            for mine, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-5, err_msg=deed)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda o: torch.save(o, io.BytesIO()),
    "in a dictionary": lambda o: copy.deepcopy({"optimizer": o}),
}


@pytest.mark.parametrize("way", ["local", "sharded", "served"])
def test_a_way_is_not_copied_by_halves(way: str) -> None:
    def copy_everything(rank: int) -> None:
        training = build(WAYS[way], Tied())
        for name, make in COPIES.items():
            said = said_by(partial(make, training.optimizer))
            assert said.startswith("TypeError"), name
            assert "can't be copied or pickled" in said, name
            assert "save its state_dict()" in said
        torch.save(copy.deepcopy(training.model), io.BytesIO())
        training.close()

    threads(2, copy_everything)


@pytest.mark.parametrize("way", ["local", "served"])
def test_a_scaled_step_that_breaks_off_leaves_no_scale(way: str) -> None:
    """GradScaler would multiply it into the next one."""

    def interrupt(rank: int) -> None:
        training: Any = build(WAYS[way], Tied())
        if way == "local" or rank == 0:
            optimizer, scaler = training.optimizer, torch.amp.GradScaler("cpu", 4.0)
            scaler.scale(loss_of(training.model)).backward()

            def broken(closure: Any) -> None:
                assert optimizer.grad_scale == 4.0
                raise KeyboardInterrupt

            optimizer._evaluate = optimizer._step_alone = (
                broken if way == "served" else (lambda closure, scale: broken(closure))
            )
            with pytest.raises(KeyboardInterrupt):
                scaler.step(optimizer)
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
        training.close()

    threads(2, interrupt)


WRAPPED = {
    ("local", "Sharp"): "nothing",
    ("local", "LBFGS"): "nothing",
    ("local", "InFewBits"): "nothing",
    ("local", "ScheduleFree"): "ScheduleFree keeps weights in its state (which train() and eval()",
    ("local", "ASGD"): "ASGD keeps weights in its state ('ax')",
    ("local", "Lookahead"): "Lookahead keeps weights in its state ('slow')",
    ("sharded", "Sharp"): "Sharp computes several gradients in a step",
    ("sharded", "ScheduleFree"): "ScheduleFree keeps weights in its state",
    ("sharded", "DecayOfMatrices"): "DecayOfMatrices does not step each element by itself",
    ("sharded", "Noisy"): "nothing",
    ("served", "Sharp"): "Sharp computes several gradients in a step",
    ("served", "LBFGS"): "LBFGS computes several gradients in a step",
    ("served", "ScheduleFree"): "ScheduleFree keeps weights in its state",
}


def step_with_closure(training: Training, clip_norm: float | None = None) -> list[np.ndarray]:
    """The parameters after four steps."""
    parameters = list(training.model.parameters())

    def closure() -> float:
        training.optimizer.zero_grad()
        loss_of(training.module).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        return 0.0

    for _ in range(4):
        closure()
        training.optimizer.step(closure)
    return [p.detach().numpy().copy() for p in parameters]


@pytest.mark.parametrize(("way", "optimizer"), WRAPPED)
def test_what_an_optimizer_keeps_or_asks_for_is_given_or_refused(way: str, optimizer: str) -> None:
    def train(rank: int) -> str:
        return said_by(lambda: step_with_closure(build(WAYS[way], Tied(), OPTIMIZERS[optimizer])))

    for said in threads(2, train):
        assert WRAPPED[way, optimizer] in said


def test_what_a_closure_writes_is_no_step() -> None:
    """Late momentum went on for some steps with what a closure had clamped."""

    def steps(rank: int) -> None:
        training = build(local(), Tied(), AdamW)

        def closure() -> float:
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.clamp_(-0.01, 0.01)
            loss_of(training.module).backward()
            return 0.0

        training.optimizer.step(closure)

    for said in threads(2, lambda rank: said_by(lambda: steps(rank))):
        assert "was changed between two steps" in said


def test_a_moment_close_to_the_weights_is_none_of_them() -> None:
    """The gradient of half the square of the weights is the weights."""

    def steps(rank: int) -> None:
        model = Tied()
        optimizer = LocalSteps(AdamW(model.parameters(), lr=1e-3), model, **RAW)
        for _ in range(4):
            optimizer.zero_grad()
            halves = [0.5 * (p - 1e-4).square().sum() for p in model.parameters()]
            torch.stack(halves).sum().backward()
            optimizer.step()
        optimizer.close()

    def train(rank: int) -> str:
        return said_by(lambda: steps(rank))

    assert threads(2, train) == ["nothing"] * 2


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_each_gradient_of_a_step_is_clipped(clip_norm: float | None) -> None:
    def compare(rank: int) -> None:
        wrapped = step_with_closure(build(local(clip_norm=clip_norm), Tied(), Sharp))
        alone = Training(Way("alone"), Tied(), Sharp, Program())
        for mine, other in zip(wrapped, step_with_closure(alone, clip_norm), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)

    threads(1, compare)


def test_train_and_eval_are_those_of_the_wrapped_optimizer() -> None:
    def train(rank: int) -> list[torch.Tensor]:
        """Of three ranks, of which the last serves averages: the model in eval()."""
        training = build(WAYS["served gradients"], Tied(), ScheduleFree)
        training.run(3, loss_of)
        in_training = [p.detach().clone() for p in training.model.parameters()]
        if rank < 2:
            training.optimizer.eval()
        evaluated = [p.detach().clone() for p in training.model.parameters()]
        if rank < 2:
            training.optimizer.train()
        for parameter, before, mean in zip(
            training.model.parameters(), in_training, evaluated, strict=True
        ):
            torch.testing.assert_close(parameter.detach(), before)
            assert rank == 2 or not torch.equal(parameter, mean)
        training.close()
        return evaluated

    first, second, _ = threads(3, train)
    for evaluated, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(evaluated, other)


def test_the_wrapped_adam_is_an_adam_during_and_after_local_steps() -> None:
    threads(1, lambda rank: leave_local_steps())


def leave_local_steps() -> None:
    training: Any = build(local(every=2), Tied(), partial(AdamW, lr=0.01))
    model, inner, optimizer = training.model, training.inner, training.optimizer
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")
    for _ in range(3):
        training.step(loss_of)
        assert inner.state_dict()["param_groups"][0]["betas"] == (0.9, 0.999)
    model.first.weight.data = torch.zeros_like(model.first.weight)
    said = said_by(lambda: training.step(loss_of))
    assert "first.weight was changed between two steps" in said
    assert said_by(optimizer.synchronize) == said  # it went on without the change
    optimizer.close()
    other = AdamW(model.parameters())
    other.load_state_dict(inner.state_dict())
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    loss_of(model).backward()
    inner.step()
    for _ in range(2):  # the second takes over from the first, which was given up
        training.optimizer = LocalSteps(inner, model, codec="raw")
    training.step(loss_of)


class ThreeBetas(AdamW):
    """An Adam of one's own, with a third of `betas`."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0]["betas"] = (0.9, 0.999, 0.5)

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        kept = group["betas"]
        group["betas"], self.third = kept[:2], kept[2]
        loss = super().step(closure)
        group["betas"] = kept
        return loss


def test_an_adam_may_have_further_betas() -> None:
    def train(rank: int) -> None:
        training: Any = build(local(every=2), Tied(), partial(ThreeBetas, lr=0.01))
        inner = training.inner
        training.step(loss_of)
        assert (inner.third, inner.param_groups[0]["betas"]) == (0.5, (0.9, 0.999, 0.5))

    threads(1, train)


def test_an_outer_optimizer_has_the_anchors() -> None:
    threads(1, lambda rank: refuse_outer())


def refuse_outer() -> None:
    made: list[Optimizer] = []

    def make(outer: Any) -> Any:
        return build(local(outer=outer), Tied()).optimizer

    def keep(parameters: Any) -> Optimizer:
        made.append(SGD(parameters, lr=1.0))
        return made[-1]

    foreign = "ValueError: the outer SGD has other parameters than the list"
    assert foreign in said_by(lambda: make(lambda parameters: SGD(Tied().parameters(), lr=1.0)))
    said = said_by(lambda: make(lambda parameters: None))
    assert "outer= must return the optimizer that it makes, and returned None" in said
    optimizer = make(keep)
    del made[-1].param_groups[0]["params"][0]
    assert foreign in said_by(optimizer.step)


def test_a_thawed_layer_is_found() -> None:
    """A layer that was frozen in `connect` is trained with barrier="tensor"."""

    def thaw(rank: int) -> str:
        model = Tied()
        model.first.requires_grad_(False)
        training = build(WAYS["served by the tensor"], model)
        if rank == 1:
            return said_by(lambda: training.run(1, loss_of))
        training.optimizer.connect()
        training.step(loss_of)
        torch.save(model, io.BytesIO())  # the hooks on it are no part of a copy
        copied = copy.deepcopy(model)
        model.first.requires_grad_(True)
        said = said_by(lambda: training.step(loss_of))
        copied(torch.ones(1, 6))
        return said

    said = "first.weight required no gradient in connect() and requires one now"
    assert said in threads(2, thaw)[0]


def test_qsvrg_goes_on_from_the_parameters_as_they_are() -> None:
    """An epoch from other parameters than the last epoch's, by two ways."""
    inputs, labels = torch.randn(12, 4, generator=torch.Generator().manual_seed(2)), torch.ones(12)
    largest = float(inputs.square().sum(dim=1).max())

    def move(is_loaded: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(4))

        def loss_of(j: torch.Tensor) -> torch.Tensor:
            return (inputs[j] @ weight - labels[j]).square().mean() / 2

        optimizer = QSVRG([weight], loss_of, 12, smoothness=largest, convexity=0.1 * largest)
        optimizer.epoch()
        if is_loaded:
            optimizer.load_state_dict({**optimizer.state_dict(), "values": torch.ones(4)})
        else:
            with torch.no_grad():
                weight.fill_(1.0)
        optimizer.epoch()
        assert "TypeError: a QSVRG can't be copied" in said_by(lambda: copy.deepcopy(optimizer))
        return weight.detach()

    ((moved, loaded),) = threads(1, lambda rank: [move(False), move(True)])
    np.testing.assert_array_equal(moved, loaded)
