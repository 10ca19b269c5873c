"""Larger models: ResNet-20 at full width, and a transformer of ten million values."""

from __future__ import annotations

from functools import partial
from typing import Any

from gradwire.local_schedule import GATED_CODEC
from gradwire_lab.evaluate.arms import Arm, arm
from gradwire_lab.evaluate.diloco import size
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import Found, accuracy_table

_SEEDS = 2
_LONG_STEPS = 25600
_OUTER = {"every": 30, "outer": "nesterov"}

_GPT: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("ddp", {}),
    "LocalSteps, 32 bits": ("raw", {}),
    "`small`": ("3lc:s=1.00,coder=rice", {}),
    "`half-byte`": ("qsgd:bits=4", {}),
    "DiLoCo, 32 bits": ("raw", _OUTER),
    "SparseLoCo": (
        "topk2bit:density=0.02/raw",
        {"every": 30, "outer": "sgd", "residual_decay": 0.95},
    ),
    "MuLoCo": ("qsgd:bits=4,ef=on", _OUTER | {"optimizer": "muon", "learning_rate": 4e-3}),
    "PULSELoCo": (GATED_CODEC, _OUTER | {"gate": "bfloat16"}),
}
_IMAGES = {
    "32-bit float": "raw",
    "3LC (s=1.00)": "3lc:s=1.00,coder=rice",
    "3LC (s=1.75)": "3lc:s=1.75,coder=rice",
    "MQE 1-bit int": "onebit",
    "5% sparsification": "topk:ratio=0.05",
}
_LONG = ("32-bit float", "3LC (s=1.75)")

_GPT_ARMS = {
    name: arm("gpt10m", codec, seeds=_SEEDS, **changes) for name, (codec, changes) in _GPT.items()
}
_IMAGE_ARMS = {name: arm("resnet20", codec, seeds=_SEEDS) for name, codec in _IMAGES.items()}
_LONG_ARMS = {name: arm("resnet20", _IMAGES[name], steps=_LONG_STEPS) for name in _LONG}
_DEEP_ARMS = {name: arm("resnet110", _IMAGES[name]) for name in _LONG}


def _table(found: Found, arms: dict[str, Arm]) -> str:
    cells = {name: (size(found, one),) for name, one in arms.items()}
    return accuracy_table(found, arms, ("MB",), cells)


def _experiment(title: str, about: str, arms: dict[str, Arm]) -> Experiment:
    return Experiment(title, about, tuple(arms.values()), partial(_table, arms=arms))


EVALUATION = Evaluation(
    "larger",
    "Larger models",
    "These runs try on larger models what the smaller tasks show. MB are what a worker sends in "
    "the whole training run, and receives as well.",
    (
        _experiment(
            "Transformer of 10 million values",
            "Eight blocks of width 320; sequences of 256 bytes of the dictionary GCIDE (Debian's "
            "`dict-gcide` 0.48.5). Rows from DiLoCo on exchange every 30 steps. A run takes 0.5 to "
            "2.4 h of a core.",
            _GPT_ARMS,
        ),
        _experiment(
            "ResNet-20 at full width",
            "269,000 values, ten workers x 32. The workers push gradients and pull the change of "
            "the model. A run takes some 1.1 h of a core of a fast machine.",
            _IMAGE_ARMS,
        ),
        _experiment(
            "ResNet-20 with all of 3LC's steps",
            f"{_LONG_STEPS:,} steps. A run takes some 4 h of a core of a fast machine.",
            _LONG_ARMS,
        ),
        _experiment(
            "ResNet-110",
            "3LC's own model, with as many steps as there. A run takes 20 to 40 h of a core; none "
            "has been made.",
            _DEEP_ARMS,
        ),
    ),
)
