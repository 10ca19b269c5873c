"""Muon as DiLoCo's inner optimizer (Thérien, Huang, Rish, Belilovsky; arXiv:2505.23725)."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from gradwire_lab.evaluate.arms import Arm, arm
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import MISSING, Found, table

_SEEDS = 3
_STEPS, _EVERY, _WIDTH = 300, 15, 64
# Optimizers, with the learning rates tried for DDP and for DiLoCo.
_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "adamw": {"DDP": (1.5e-3, 3e-3), "DiLoCo": (7.5e-4, 1.5e-3, 3e-3, 6e-3)},
    "muon": {"DDP": (6e-3, 1.2e-2), "DiLoCo": (6e-3, 1.2e-2, 2.4e-2)},
}
_BEST = {"adamw": {"DDP": 0.003, "DiLoCo": 1.5e-3}, "muon": {"DDP": 0.012, "DiLoCo": 1.2e-2}}
_CODECS = {
    "DDP": "ddp",
    "DiLoCo, 32 bits": "raw",
    "DiLoCo, 4 bits": "qsgd:bits=4,ef=on",
    "DiLoCo, 2 bits": "topk2bit:density=0.5",
    "DiLoCo, `small`": "3lc:s=1.00,coder=rice",
}
_NAMES = {"adamw": "AdamW", "muon": "Muon"}


def _arm(codec: str, optimizer: str, rate: float, seeds: int) -> Arm:
    way: dict[str, Any] = {} if codec == "ddp" else {"every": _EVERY, "outer": "nesterov"}
    way |= {"optimizer": optimizer, "learning_rate": rate, "steps": _STEPS, "width": _WIDTH}
    return arm("gpt", codec, seeds=seeds, eval_every=_STEPS, **way)


def _tuning() -> dict[tuple[str, str], dict[float, Arm]]:
    return {
        (way, optimizer): {
            rate: _arm("ddp" if way == "DDP" else "raw", optimizer, rate, 1) for rate in rates
        }
        for optimizer, ways in _RATES.items()
        for way, rates in ways.items()
    }


def _arms() -> dict[tuple[str, str], Arm]:
    return {
        (label, o): _arm(codec, o, _BEST[o][label.partition(",")[0]], _SEEDS)
        for label, codec in _CODECS.items()
        for o in _RATES
    }


def _tuning_table(found: Found) -> str:
    rows = [
        [f"{way}, {_NAMES[o]}", ", ".join(f"{r:g}: {found.text(a)}" for r, a in arms.items())]
        for (way, o), arms in _tuning().items()
    ]
    return table(("way", "learning rate: held-out loss"), rows)


def _table(found: Found) -> str:
    arms, rows = _arms(), []
    for label, codec in _CODECS.items():
        one = arms[label, "adamw"]
        runs = found.runs(one)
        sent = [sum(each or 0.0 for each in (run.push_bytes, run.pull_bytes)) / 1e6 for run in runs]
        cells = [found.text(arms[label, o]) for o in _RATES]
        megabytes = f"{fmean(sent):.3g}" if sent else MISSING
        rows.append([f"{label}", f"`{codec}`", found.bits(one), megabytes, *cells])
    return table(("way", "codec", "bits", "MB", *_NAMES.values()), rows)


EVALUATION = Evaluation(
    "muloco",
    "MuLoCo: Muon as DiLoCo's inner optimizer, here",
    "Thérien, Huang, Rish, Belilovsky: MuLoCo (arXiv:2505.23725). Muon steps the matrices inside "
    "the blocks, at rates that match AdamW's (`match_rms_adamw`), and AdamW the rest. The outer "
    "optimizer is DiLoCo's: Nesterov, momentum 0.9, rate 0.7. All codecs of DiLoCo keep residuals, "
    "as the paper's do, and code both ways.",
    (
        Experiment(
            "Muon and AdamW at equal bytes",
            "Means of three seeds; bits of a value, pushed and pulled; MB that a worker pushed and "
            "pulled in all. The paper (abstract): with error feedback, Muon's changes can be sent "
            "in 2 bits with next to no loss, and MuLoCo ends better than DiLoCo with AdamW. The "
            "model is small (width 64) and its training far from its end.",
            tuple(_arms().values()),
            _table,
        ),
        Experiment(
            "Learning rates",
            "The rates that were tried with 32 bits: seed 0, and all seeds of the best, which "
            "stands above.",
            tuple(one for arms in _tuning().values() for one in arms.values()),
            _tuning_table,
        ),
    ),
)
