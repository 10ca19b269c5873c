#!/usr/bin/env python3
"""Trains a small model with every optimizer at hand, by PyTorch's DDP and by LocalSteps.

    bench/optimizers.py [--only NAME ...] [--json FILE]

Two ranks in one process take 200 steps of a perceptron that learns another one's outputs, by

    DDP     PyTorch's own, without gradwire
    raw     LocalSteps that exchanges each step's changes as they are
    small   the same through the codec "small", and `every 8` of these steps
    alike   raw, where both ranks have the same data: it is what the optimizer does by itself, and
            the largest difference to DDP relative to the largest parameter must be that of rounding

A column has the loss on data that were not trained on, or the text of the refusal. Optimizers of
packages (constraints-recipes.txt) that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import LocalSteps, loopback

RANKS, STEPS, BATCH, INPUTS, WIDTH = 2, 200, 32, 32, 64
Make = Callable[[nn.Module], Any]  # an optimizer, or a list of them


def named(name: str, **options: Any) -> Make:
    """An optimizer by module and class, of all parameters."""
    module, _, kind = name.rpartition(".")

    def make(model: nn.Module) -> Any:
        return getattr(importlib.import_module(module), kind)(model.parameters(), **options)

    return make


def beside_adamw(name: str, **options: Any) -> Make:
    """An optimizer of the hidden matrices, in a list with AdamW of the rest."""
    module, _, kind = name.rpartition(".")

    def make(model: nn.Module) -> Any:
        hidden = [p for n, p in model.named_parameters() if n == "hidden.weight"]
        rest = [p for n, p in model.named_parameters() if n != "hidden.weight"]
        first = getattr(importlib.import_module(module), kind)(hidden, **options)
        return [first, optim.AdamW(rest, lr=3e-3)]

    return make


def sharpness_aware(model: nn.Module) -> Any:
    return importlib.import_module("pytorch_optimizer").SAM(
        model.parameters(), base_optimizer=optim.SGD, lr=0.1
    )


def mini(model: nn.Module) -> Any:
    options = {"lr": 3e-3, "dim": WIDTH, "n_heads": 1, "verbose": False}
    return importlib.import_module("adam_mini").Adam_mini(model.named_parameters(), **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD": named("torch.optim.SGD", lr=0.1),
    "SGD, momentum": named("torch.optim.SGD", lr=0.05, momentum=0.9, nesterov=True),
    "SGD, fused": named("torch.optim.SGD", lr=0.05, momentum=0.9, fused=True),
    "Adam": named("torch.optim.Adam", lr=3e-3),
    "Adam, amsgrad": named("torch.optim.Adam", lr=3e-3, amsgrad=True),
    "AdamW": named("torch.optim.AdamW", lr=3e-3),
    "AdamW, foreach": named("torch.optim.AdamW", lr=3e-3, foreach=True),
    "AdamW, fused": named("torch.optim.AdamW", lr=3e-3, fused=True),
    "AdamW, capturable": named("torch.optim.AdamW", lr=3e-3, capturable=True),
    "AdamW, differentiable": named("torch.optim.AdamW", lr=3e-3, differentiable=True),
    "NAdam": named("torch.optim.NAdam", lr=3e-3),
    "RAdam": named("torch.optim.RAdam", lr=3e-3),
    "Adamax": named("torch.optim.Adamax", lr=3e-3),
    "Adagrad": named("torch.optim.Adagrad", lr=3e-2),
    "Adadelta": named("torch.optim.Adadelta", lr=1.0),
    "RMSprop": named("torch.optim.RMSprop", lr=1e-3),
    "Rprop": named("torch.optim.Rprop", lr=1e-3),
    "ASGD": named("torch.optim.ASGD", lr=0.1),
    "Adafactor": named("torch.optim.Adafactor", lr=1e-2),
    "Muon and AdamW": beside_adamw("torch.optim.Muon", lr=3e-3, adjust_lr_fn="match_rms_adamw"),
    "LBFGS": named("torch.optim.LBFGS", lr=0.1, max_iter=4),
    "SAM (pytorch_optimizer)": sharpness_aware,
    "Lion (lion_pytorch)": named("lion_pytorch.Lion", lr=5e-4),
    "Prodigy (prodigyopt)": named("prodigyopt.Prodigy", lr=1.0),
    "CAME (came_pytorch)": named("came_pytorch.CAME", lr=3e-3),
    "Adam-mini (adam_mini)": mini,
    "AdamWScheduleFree (schedulefree)": named("schedulefree.AdamWScheduleFree", lr=3e-3),
    "SGDScheduleFree (schedulefree)": named("schedulefree.SGDScheduleFree", lr=0.3),
    "AdamW8bit (torchao)": named("torchao.optim.AdamW8bit", lr=3e-3, block_size=64),
    "AdamW4bit (torchao)": named("torchao.optim.AdamW4bit", lr=3e-3, block_size=64),
    "AdamW8bit (bitsandbytes)": named("bitsandbytes.optim.AdamW8bit", lr=3e-3),
    "Lion8bit (bitsandbytes)": named("bitsandbytes.optim.Lion8bit", lr=5e-4),
    "SOAP (pytorch_optimizer)": named("pytorch_optimizer.SOAP", lr=3e-3),
    "Shampoo (pytorch_optimizer)": named("pytorch_optimizer.Shampoo", lr=0.1),
    "ScalableShampoo (pytorch_optimizer)": named("pytorch_optimizer.ScalableShampoo", lr=3e-3),
    "Lookahead (pytorch_optimizer)": lambda model: _lookahead(model),
    "AdEMAMix (pytorch_optimizer)": named("pytorch_optimizer.AdEMAMix", lr=3e-3),
    "ADOPT (pytorch_optimizer)": named("pytorch_optimizer.ADOPT", lr=3e-3),
    "SophiaH (pytorch_optimizer)": named("pytorch_optimizer.SophiaH", lr=3e-3),
    "LAMB (pytorch_optimizer)": named("pytorch_optimizer.Lamb", lr=3e-3),
    "GaLore (pytorch_optimizer)": named("pytorch_optimizer.GaLore", lr=3e-3),
}


def _lookahead(model: nn.Module) -> Any:
    return importlib.import_module("pytorch_optimizer").Lookahead(
        optim.SGD(model.parameters(), lr=0.1)
    )


class Perceptron(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(INPUTS, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.hidden = nn.Linear(WIDTH, WIDTH, bias=False)
            self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(torch.tanh(self.norm(self.first(x)))))
        logits: Tensor = self.last(x)
        return logits


@functools.cache
def teacher() -> Perceptron:
    return Perceptron(seed=1)


def batch(seed: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, (8 * teacher()(x)).argmax(dim=1)


def held_out(model: nn.Module) -> float:
    x, y = batch(-1, 2048)
    with torch.no_grad():
        return float(functional.cross_entropy(model(x), y))


def train(make: Make, way: str, rank: int, alike: bool) -> tuple[float, list[Tensor]]:
    """The loss of the model after all steps, and its parameters."""
    torch.manual_seed(0)
    model, source = Perceptron(seed=0), None
    called: nn.Module = model
    made = make(model)
    parts = made if isinstance(made, list) else [made]
    if way == "DDP":
        called = DistributedDataParallel(model)
    else:
        codec, every = ("raw", 1) if way == "raw" else ("small", 8 if way == "every 8" else 1)
        options: dict[str, Any] = {"late_momentum": False, "correct_noise": False} if alike else {}
        source = LocalSteps(made, model, codec, every=every, **options)
        parts = [source]
    for part in parts:
        if callable(getattr(part, "train", None)):
            part.train()
    takes_closure = isinstance(made, optim.LBFGS) or hasattr(made, "second_step")
    for step in range(STEPS):
        x, y = batch(STEPS * (0 if alike else rank + 1) + step + 10_000)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            for part in parts:
                part.zero_grad()
            loss = functional.cross_entropy(called(x), y)
            loss.backward()
            return loss

        if takes_closure:
            (part,) = parts
            if not isinstance(made, optim.LBFGS):
                closure()
            part.step(closure)
            continue
        closure()
        for part in parts:
            part.step()
    if isinstance(source, LocalSteps):
        source.synchronize()
        source.close()
    for part in parts:
        if callable(getattr(part, "eval", None)):
            part.eval()
    return held_out(model), [p.detach().clone() for p in model.parameters()]


def run(make: Make, way: str, alike: bool = False) -> tuple[str, list[Tensor]]:
    """The loss as text, or the error; the parameters of rank 0."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = loopback.run(RANKS, lambda rank: train(make, way, rank, alike))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0], []
    (loss, values), (_, others) = found
    equal = all(map(torch.equal, values, others))
    return f"{loss:.4f}" + ("" if equal else ", ranks differ"), values


def compare(name: str) -> dict[str, str]:
    make = OPTIMIZERS[name]
    row = {"DDP": run(make, "DDP")[0]}
    row |= {way: run(make, way)[0] for way in ("raw", "small", "every 8")}
    one, other = run(make, "DDP", alike=True)[1], run(make, "raw", alike=True)[1]
    if one and other:
        largest = max(float(p.abs().max()) for p in one)
        difference = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
        row["alike"] = f"{difference / largest:.1e}"
    return row


def missing(name: str) -> str | None:
    """The package that an optimizer needs and that is not installed."""
    package = name.partition("(")[2].rstrip(")")
    try:
        importlib.import_module(package or "torch")
    except ImportError:
        return package
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, refused = {}, []
    heads = ("optimizer", "DDP", "raw", "small", "every 8", "alike")
    print(f"| {' | '.join(heads)} |\n| --- |{' ---: |' * 5}")
    for name in arguments.only:
        if package := missing(name):
            refused.append(f"{name}: {package} is not installed")
            continue
        rows[name] = row = compare(name)
        print(f"| {name} | {' | '.join(row.get(head, '') for head in heads[1:])} |", flush=True)
    print("\n".join(refused))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
