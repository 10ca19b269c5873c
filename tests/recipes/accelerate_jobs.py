"""What test_accelerate.py looks at: training runs with Accelerate on two ranks. Each rank writes
what came out as JSON to the folder that it is given."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.contrib.accelerate import compress
from gradwire.torch import LocalSteps

FOLDER = Path(sys.argv[1])
STEPS = 20
WAYS: dict[str, dict[str, Any]] = {"local": {"every": 3}, "hook": {}}
found: dict[str, Any] = {}


class Training:
    """A model with batch normalisation, AdamW and a schedule, prepared."""

    def __init__(self, codec: str | None = None, scaled: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        same_buckets = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[same_buckets])
        inputs = torch.randn(640, 16)
        labels = (inputs @ torch.randn(16, 8)).argmax(dim=1)
        model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
        adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.95)
        data = DataLoader(TensorDataset(inputs, labels), batch_size=16)
        self.model, self.optimizer, self.batches, self.schedule = self.accelerator.prepare(
            model, adamw, data, schedule
        )
        if scaled:  # as mixed_precision="fp16" does on GPUs
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            AcceleratedOptimizer.__init__(
                self.optimizer, adamw, device_placement=False, scaler=self.accelerator.scaler
            )
        self.way: Any = None
        if codec is not None or options:
            self.way = compress(self.accelerator, self.model, self.optimizer, codec, **options)

    def run(
        self, start: int = 0, stop: int = STEPS, save_at: int = -1, folder: Path = FOLDER
    ) -> Training:
        for step, (inputs, labels) in enumerate(self.batches):
            if not start <= step < stop:
                continue
            if step == save_at:
                self.accelerator.save_state(str(folder))
            self.optimizer.zero_grad()
            self.accelerator.backward(nn.functional.cross_entropy(self.model(inputs), labels))
            self.optimizer.step()
            self.schedule.step()
        if self.way is not None:
            self.way.finish()
        return self

    def take_steps(self, count: int) -> None:
        """Without `finish`."""
        for _, (inputs, labels) in zip(range(count), self.batches, strict=False):
            self.accelerator.backward(nn.functional.cross_entropy(self.model(inputs), labels))
            self.optimizer.step()

    def digest(self) -> str:
        parameters = [p.detach().numpy().tobytes() for p in self.model.parameters()]
        return hashlib.sha256(b"".join(parameters)).hexdigest()


def by_hand(every: int) -> str:
    training = Training()
    steps = LocalSteps(training.optimizer.optimizer, training.model.module, "small", every=every)
    for inputs, labels in training.batches:
        steps.zero_grad()
        nn.functional.cross_entropy(training.model.module(inputs), labels).backward()
        steps.step()
        training.schedule.step()
    steps.synchronize()
    steps.close()
    return training.digest()


def main() -> None:
    ddp = Training().run()
    found["ddp"] = ddp.digest()
    found["hook raw"] = Training("raw").run().digest()
    local = Training("small", every=3).run()
    found["local"] = local.digest()
    found["ratio"] = local.way.exchange.stats().ratio
    found["local by hand"] = by_hand(3)
    found["local scaled"] = Training("small", scaled=True, every=3).run().digest()

    for way, options in WAYS.items():
        folder = FOLDER / way
        first = Training("small", **options).run(save_at=10, folder=folder)
        found[f"{way} whole"] = first.digest()
        second = Training("small", **options)
        second.accelerator.load_state(str(folder))
        found[f"{way} resumed"] = second.run(start=10).digest()
    saved = load_file(FOLDER / "local" / "model.safetensors")  # after 10 steps
    exchanged = Training("small", every=3).run(stop=9).model.module.named_parameters()
    found["saved is agreed"] = all(torch.equal(p, saved[name]) for name, p in exchanged)

    training = Training("small", every=7).run(stop=4, save_at=2, folder=FOLDER / "detached")
    training.way.detach()
    found["detached"] = type(training.optimizer.optimizer).__name__
    training.accelerator.load_state(str(FOLDER / "detached"))
    found["detached loads"] = training.digest()
    found["two"] = [train_two(way) for way in WAYS]
    found["hooks"] = save_by_hooks()
    found["agreed"] = look_at_agreed()
    wrong: dict[str, Callable[[Training], Any]] = {
        "not prepared": lambda t: compress(t.accelerator, t.model, t.optimizer.optimizer),
        "twice": lambda t: [compress(t.accelerator, t.model, t.optimizer) for _ in range(2)],
        "twice local": lambda t: [
            compress(t.accelerator, t.model, t.optimizer, every=2) for _ in range(2)
        ],
        "plain model": lambda t: compress(t.accelerator, t.model.module, t.optimizer),
    }
    for name, make in wrong.items():
        try:
            make(Training())
        except (TypeError, RuntimeError) as error:
            found[name] = str(error)

    (FOLDER / f"found_{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


def train_two(way: str) -> list[bool]:
    """Whether each of two models ends as it would have without a save_state and load_state."""
    digests = []
    for resumes in (False, True):
        first = Training("small", **WAYS[way])
        torch.manual_seed(1)
        second = copy.copy(first)
        layer = nn.Linear(16, 8)
        second.model, second.optimizer = first.accelerator.prepare(
            layer, torch.optim.AdamW(layer.parameters(), lr=3e-3)
        )
        second.way = compress(first.accelerator, second.model, second.optimizer, **WAYS[way])
        if resumes:
            first.accelerator.load_state(str(FOLDER / f"two {way}"))
        for step, (inputs, labels) in enumerate(first.batches):
            if step == 10 and not resumes:
                first.accelerator.save_state(str(FOLDER / f"two {way}"))
            for each in (first, second) if step >= 10 or not resumes else ():
                each.optimizer.zero_grad()
                first.accelerator.backward(nn.functional.cross_entropy(each.model(inputs), labels))
                each.optimizer.step()
        for each in (first, second):
            each.way.finish()
        digests.append([first.digest(), second.digest()])
    return [whole == resumed for whole, resumed in zip(*digests, strict=True)]


def save_by_hooks() -> list[str]:
    """The model as hooks of save_state see it that come before and after gradwire's, and as the
    ranks agreed last. The first hook saves the model itself."""
    training = Training()
    seen: list[str] = []

    def take(_: list[nn.Module], weights: list[Any], folder: str) -> None:
        seen.append(training.digest())
        weights.clear()

    training.accelerator.register_save_state_pre_hook(take)
    training.way = compress(training.accelerator, training.model, training.optimizer, every=3)
    training.accelerator.register_save_state_pre_hook(take)
    training.take_steps(5)
    training.accelerator.save_state(str(FOLDER / "hooks"))
    with training.way.agreed():
        return [*seen, training.digest()]


def look_at_agreed() -> list[str]:
    """The model before, while and after the agreed weights are in it, after 5 steps."""
    training = Training("raw", every=3)
    training.take_steps(5)
    seen = [training.digest()]
    with training.way.agreed():
        seen.append(training.digest())
    return [*seen, training.digest()]


main()
