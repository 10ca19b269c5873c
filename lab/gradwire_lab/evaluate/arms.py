"""The trainings of the evaluations: tasks, and the ways in which each is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from gradwire_lab.train.options import from_options
from gradwire_lab.train.recipes import IMAGES, MODELS
from gradwire_lab.train.results import run_name
from gradwire_lab.train.settings import ONE_PROCESS, TrainSettings

HOOK = f"{ONE_PROCESS}:pulls=gradients"  # the average gradient is pulled, as with DDP's hook

# Options of `gradwire train`, by the names in TrainSettings. Each task is meant to be long enough
# that its uncompressed training converges; what it still gains in the last tenth of the steps is in
# docs/results/trainings.md.
TASKS: dict[str, dict[str, Any]] = {
    "resnet8": {"model": "resnet8", "workers": 10, "steps": 6732},  # 36 epochs of 60,000 images
    "lenet": {
        "model": "lenet",
        "dropout": 0.5,
        "weight_decay": 5e-4,
        "learning_rate": 0.01,
        "steps": 8000,
    },
    "mlp": {"model": "mlp", "weight_decay": 5e-5, "steps": 8000},
    "resnet20": {"model": "resnet20", "workers": 10, "steps": 6732},
    "resnet110": {"model": "resnet110", "workers": 10, "steps": 25600},
    "gpt": {"model": "gpt", "warmup": 50, "steps": 2500},
    "gpt10m": {"model": "gpt10m", "steps": 1000},
    "lstm": {"model": "lstm", "steps": 3000},
}
RESNETS = tuple(name for name in MODELS if name.startswith("resnet"))
_RESNET = RESNETS[0]
_RESNET_STEPS = 25600  # of the larger ResNets, as in 3LC
# What from_options takes from the command line.
_NEEDED = ("model", "exchange", "every", "steps")


@dataclass(frozen=True)
class Setup:
    """What a call can change: options of the command."""

    scale: Annotated[
        float, Option(help="Share of the steps, for a trial.", min=0.0001, max=1.0)
    ] = 1.0
    resnet: Annotated[
        str, Option(help=f"{', '.join(RESNETS)}; from resnet20 on with 3LC's 25,600 steps.")
    ] = _RESNET
    data: Annotated[str, Option(help=f"{', '.join(IMAGES)}.")] = IMAGES[0]
    data_dir: Annotated[Path | None, Option(help="Folder of the images.")] = None
    device: Annotated[str, Option(help="cpu, cuda, cuda:K.")] = "cpu"
    threads: Annotated[int, Option(help="Threads of a training.", min=1, max=256)] = 1

    @property
    def suffix(self) -> str:
        """Names what changes results and is not the default; "" if nothing does."""
        usual, names = Setup(), ("resnet", "data", "device", "scale")
        given = {name: getattr(self, name) for name in names}
        return "".join(f"-{v}" for name, v in given.items() if v != getattr(usual, name))


@dataclass(frozen=True)
class Arm:
    """One way to train a task, with the seeds 0, 1, ...

    changes: options that differ from the task's, by the names in TrainSettings. observed: codecs
    that are tried on its gradients meanwhile (observe.py). timed: its seconds are wanted, so it
    must run alone.
    """

    task: str
    codec: str
    changes: tuple[tuple[str, Any], ...] = ()
    observed: tuple[str, ...] = ()
    seeds: int = field(default=1, compare=False)
    timed: bool = field(default=False, compare=False)

    def settings(self, seed: int, setup: Setup) -> TrainSettings:
        """Those of a run. Raises SettingsError for what does not go together."""
        options: dict[str, Any] = {"exchange": ONE_PROCESS, "threads": setup.threads}
        options |= TASKS[self.task] | dict(self.changes)
        if not self.timed:  # processes on shaped links compute on the CPU
            options["device"] = setup.device
        scale = setup.scale
        if self.task == _RESNET != setup.resnet:
            options["model"] = setup.resnet
            scale *= 1.0 if self.timed else _RESNET_STEPS / TASKS[_RESNET]["steps"]
        if MODELS[options["model"]].data == IMAGES:
            options = {"data": setup.data, "data_dir": setup.data_dir} | options
        every = options.setdefault("every", 1)
        steps = options["steps"] = max(round(options["steps"] * scale / every), 1) * every
        if "warmup" in options:
            options["warmup"] = min(options["warmup"], steps)
        needed = {name: getattr(TrainSettings, name) for name in _NEEDED}
        return from_options(needed | options | {"codecs": [self.codec], "seed": seed})

    def name(self, seed: int) -> str:
        """The name of a run among those of its task."""
        words = [self.codec, *(f"{name}={value}" for name, value in self.changes)]
        words += ["observed", *self.observed] if self.observed else []
        return run_name(",".join(words), seed)


def arm(
    task: str,
    codec: str,
    *,
    observed: tuple[str, ...] = (),
    seeds: int = 1,
    timed: bool = False,
    **changes: Any,
) -> Arm:
    return Arm(task, codec, tuple(changes.items()), observed, seeds, timed)
