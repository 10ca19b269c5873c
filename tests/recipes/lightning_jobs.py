"""What test_lightning.py looks at: training runs of Lightning's Trainer and of Fabric on two ranks.
Each rank writes what came out as JSON to the folder that it is given."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from gradwire.contrib.lightning import FabricStrategy, GradwireStrategy
from gradwire.torch import LocalSteps
from gradwire.torch.errors import ResidualDroppedWarning

FOLDER = Path(sys.argv[1])
SAME_BUCKETS = {"find_unused_parameters": True}
WAYS: dict[str, dict[str, Any]] = {"local": {"every": 3}, "hook": SAME_BUCKETS}
found: dict[str, Any] = {}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(640, 16, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(16, 8, generator=generator)).argmax(dim=1))


def digest(model: nn.Module | dict[str, torch.Tensor]) -> str:
    tensors = model.values() if isinstance(model, dict) else model.parameters()
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.losses: list[float] = []
        self.batches: list[Any] = []
        self.validated: list[str] = []
        self.differs: list[bool] = []  # a gradient, between the ranks
        self.ended = ""

    def training_step(self, batch: Any, _: int) -> Any:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.batches.append(batch)
        return loss

    def on_before_optimizer_step(self, _: Any) -> None:
        norms = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(norms, next(self.parameters()).grad.norm().reshape(1))
        self.differs.append(bool(norms[0] != norms[1]))

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated.append(digest(self))

    def on_train_end(self) -> None:
        self.ended = digest(self)

    def configure_optimizers(self) -> Any:
        adamw = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.95)
        return [adamw], [{"scheduler": schedule, "interval": "step"}]


class Averages(Callback):
    """Validates a moving average of the weights."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.validated: list[str] = []

    def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
        for name, values in module.named_parameters():
            self.average.setdefault(name, values.detach().clone()).lerp_(values.detach(), 0.1)

    def on_validation_start(self, _: Any, module: Any) -> None:
        self.kept = {name: p.detach().clone() for name, p in module.named_parameters()}
        self._put(module, self.average)
        self.validated.append(digest(self.average))

    def on_validation_end(self, _: Any, module: Any) -> None:
        self._put(module, self.kept)

    def _put(self, module: Any, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in module.named_parameters():
            parameter.data.copy_(values[name])


def train(name: str, strategy: Any, resume: Path | None = None, **options: Any) -> Classifier:
    module = Classifier()
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": strategy,
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": "callbacks" in options,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1 if "val_check_interval" in options else 0,
    }
    trainer = lightning.Trainer(**(arguments | options))
    data = DataLoader(make_data(), batch_size=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, data, data, ckpt_path=None if resume is None else str(resume))
    found[name] = {
        "model": digest(module),
        "losses": module.losses,
        "validated": module.validated,
        "differs": module.differs,
        "ended": module.ended,
        "warnings": [type(w.message).__name__ for w in said],
        "clip": trainer.gradient_clip_val,
    }
    return module


def keep_all(folder: Path, steps: int) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=steps, save_top_k=-1)


def by_hand(batches: Sequence[Any], clip: float | None = None, accumulate: int = 1) -> str:
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.95)
    steps = LocalSteps(adamw, model, "small", every=3, clip_norm=clip)
    for step in range(20):
        steps.zero_grad()
        for inputs, labels in batches[step * accumulate : (step + 1) * accumulate]:
            loss = nn.functional.cross_entropy(model(inputs), labels) / accumulate
            loss.backward()
        steps.step()
        schedule.step()
    steps.synchronize()
    steps.close()
    return digest(model)


def in_fabric(
    strategy: Any, save_at: int = -1, load: bool = False, stop: int = 20, name: str = ""
) -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, adamw)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.95)
    batches = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=8))
    path, start = FOLDER / f"{name}.ckpt", 0
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if load:
        fabric.load(path, state)
        start = 10
    for step, (inputs, labels) in enumerate(batches):
        if step == save_at:
            fabric.save(path, state)
        if not start <= step < stop:
            continue
        optimizer.zero_grad()
        with fabric.no_backward_sync(model, enabled=False):
            fabric.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        schedule.step()
    if isinstance(strategy, FabricStrategy):
        strategy.way.finish()
        found.setdefault("ratios", []).append(strategy.way.stats().ratio)
    return digest(model)


def main() -> None:
    train("ddp", DDPStrategy())
    raw = GradwireStrategy("raw")
    train("hook raw", raw)
    found["hook raw"]["steps"] = raw.way.stats().steps
    local = train("local", GradwireStrategy("small", every=3), gradient_clip_val=0.5)
    found["local by hand"] = {"model": by_hand(local.batches, clip=0.5)}
    local = train("accumulated", GradwireStrategy("small", every=3), accumulate_grad_batches=2)
    found["accumulated by hand"] = {"model": by_hand(local.batches, accumulate=2)}

    epochs: dict[str, Any] = {"limit_train_batches": 10}  # a checkpoint has no place in the data
    for way, options in WAYS.items():
        folder = FOLDER / way
        train(f"{way} quiet", GradwireStrategy("small", **options), **epochs)
        often: dict[str, Any] = {"val_check_interval": 4, **epochs}
        train(
            f"{way} whole",
            GradwireStrategy("small", **options),
            callbacks=[keep_all(folder, 10)],
            **often,
        )
        middle = folder / "step=10.ckpt"
        train(f"{way} resumed", GradwireStrategy("small", **options), resume=middle, **epochs)
        file = folder / f"step=10.ckpt.gradwire_{dist.get_rank()}.pt"
        file.rename(folder / f"moved_{dist.get_rank()}")
        train(f"{way} without", GradwireStrategy("small", **options), resume=middle, **epochs)
    saved = torch.load(FOLDER / "local" / "step=10.ckpt", weights_only=True)["state_dict"]
    found["saved"] = digest(saved)
    averages = Averages()
    train(
        "averages",
        GradwireStrategy("small", every=3),
        callbacks=[averages],
        val_check_interval=4,
        enable_checkpointing=False,
        **epochs,
    )
    found["averages"]["of"] = averages.validated
    train(
        "average at the end",
        GradwireStrategy("small", every=3),
        callbacks=[EMAWeightAveraging(decay=0.9)],
        enable_checkpointing=False,
        **epochs,
    )
    train("nine", GradwireStrategy("small", every=3), max_steps=9)

    latest = ModelCheckpoint(FOLDER / "latest", every_n_train_steps=5, save_top_k=1)
    train("latest", GradwireStrategy(every=3), callbacks=[latest])
    found["files"] = sorted(path.name for path in (FOLDER / "latest").iterdir())
    linking = ModelCheckpoint(
        FOLDER / "linked", "{step}", every_n_train_steps=5, save_top_k=-1, save_last="link"
    )
    linking.CHECKPOINT_NAME_LAST = "{step}-last"
    train("linked", GradwireStrategy(every=3), callbacks=[linking], max_steps=15)
    found["linked files"] = sorted(path.name for path in (FOLDER / "linked").iterdir())

    found["fabric ddp"] = in_fabric(FabricDDPStrategy())
    found["fabric hook raw"] = in_fabric(FabricStrategy("raw"))
    found["fabric local"] = in_fabric(FabricStrategy("small", every=3))
    own = Subset(make_data(), range(dist.get_rank(), 640, 2))
    found["fabric by hand"] = by_hand(list(DataLoader(own, batch_size=8)))
    for way, options in WAYS.items():
        found[f"fabric {way} whole"] = in_fabric(
            FabricStrategy("small", **options), save_at=10, name=way
        )
        found[f"fabric {way} resumed"] = in_fabric(
            FabricStrategy("small", **options), load=True, name=way
        )
    found["fabric saved"] = digest(torch.load(FOLDER / "local.ckpt", weights_only=True)["model"])
    found["fabric nine"] = in_fabric(FabricStrategy("small", every=3), stop=9)

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(every=2))
    fabric.launch()
    model = make_model()
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]  # type: ignore[index]
    for name, arguments in {"two": halves, "none": []}.items():
        try:
            fabric.setup(model, *arguments)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy())
    fabric.launch()
    both: list[Any] = []
    for layer in (nn.Linear(16, 64), nn.Linear(64, 8)):
        both += fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fabric.save(FOLDER / "both.ckpt", {str(place): each for place, each in enumerate(both)})
    found["both"] = [str(w.message) for w in said if w.category is ResidualDroppedWarning]

    (FOLDER / f"found_{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


main()
