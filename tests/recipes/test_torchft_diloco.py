"""`gradwire.torch.DiLoCo` beside torchft's own class, with the exchange "raw"."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft is not installed: scripts/test.sh recipes installs it", True)

import torchft.local_sgd

from gradwire.torch import DiLoCo, loopback

EVERY, STEPS, RANKS = 4, 16, 2


class Work:
    def wait(self) -> bool:
        return True


class Manager:
    """What torchft's class asks of its manager, over the default process group."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.steps = 0

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Work:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
        return Work()

    def should_commit(self) -> bool:
        self.steps += 1
        return True

    def current_step(self) -> int:
        return self.steps

    def start_quorum(self) -> None: ...

    def register_state_dict_fn(self, *_: Any) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))


def outer_of(part: nn.Module) -> Optimizer:
    return SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def train(rank: int, ours: bool, fragments: int, delay: int, alpha: float) -> list[torch.Tensor]:
    """The parameters after each step."""
    model = make_model()
    inner = AdamW(model.parameters(), lr=1e-2)
    if ours:
        context: Any = DiLoCo(
            model,
            inner,
            outer_of(model),
            EVERY,
            fragments=fragments,
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
        )
    else:
        parts = [model[2], model[0]] if fragments == 2 else [model]  # as gradwire deals them
        outers = [outer_of(part) for part in parts]
        context = torchft.local_sgd.DiLoCo(
            Manager(),  # it has what is called
            parts,
            inner,
            outers,
            EVERY,
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
        )
    generator = torch.Generator().manual_seed(rank)
    seen = []
    with context:
        for _ in range(STEPS):
            inner.zero_grad()
            x = torch.randn(4, 8, generator=generator)
            (model(x) - x.repeat(1, 2)).square().mean().backward()
            inner.step()
            seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return seen


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1)])
def test_numbers_are_those_of_torchft(fragments: int, delay: int, alpha: float) -> None:
    """After each step, so that an update arrives in the same step."""
    ours = loopback.run(RANKS, lambda rank: train(rank, True, fragments, delay, alpha))
    theirs = loopback.run(RANKS, lambda rank: train(rank, False, fragments, delay, alpha))
    for own, other in zip(ours, theirs, strict=True):
        for p, q in zip(own, other, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert float((own[-1] - own[0]).abs().max()) > 0.01
