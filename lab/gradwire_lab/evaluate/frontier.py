"""The frontier of bits and accuracy: codecs on each task (docs/results/trainings.md)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gradwire_lab.evaluate.arms import HOOK, Arm, arm
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import Found, accuracy_table
from gradwire_lab.train.results import Task

_S1 = "3lc:s=1.00,coder=rice"
_GROUPS = "3lc:s=1.00,bucket=500,coder=rice"
_AUTO = "auto:bits=0.5"
_SEEDS = 3

_ALL = (
    "int8",
    "qsgd:bits=4",
    "terngrad",
    "stoch3",
    "onebit",
    "topk:ratio=0.01,values=bf16,index=rice",
    "stc:density=0.01",
)
# Without error feedback. Used for gradients where these can be pulled; LocalSteps (gpt, lstm) pulls
# changes.
_FOR_GRADIENTS = ("qsgd:bits=4", "terngrad", "stoch3", "inceptionn:bound=10")

_CHANGES = "uncompressed changes"
_UPDATES: dict[str, Any] = {"compress": "updates"}  # of the workers' optimizers: LocalSteps


class _Task(NamedTuple):
    title: str
    about: str
    arms: dict[str, Arm]


def _images(task: str, *more: tuple[str, Arm], auto: str = _AUTO, seeds: int = 2) -> dict[str, Arm]:
    """seeds: of the other codecs."""
    arms = {"uncompressed": arm(task, "raw", seeds=_SEEDS)}
    arms[_S1] = arm(task, _S1, seeds=_SEEDS)
    arms |= dict(more)
    arms[auto] = arm(task, auto, seeds=seeds)
    for codec in (*_ALL, "inceptionn:bound=10"):
        changes: dict[str, Any] = {"exchange": HOOK} if codec in _FOR_GRADIENTS else {}
        label = codec + (" (the hook)" if changes else "")
        arms[label] = arm(task, codec, seeds=seeds, **changes)
    return arms


_TASKS = {
    "gpt": _Task(
        "Transformer with AdamW",
        "Sequences of 64 bytes of Python's library. The workers' own AdamW steps, and their "
        "changes are compressed (`LocalSteps`).",
        {
            "DDP": arm("gpt", "ddp", seeds=_SEEDS),
            _CHANGES: arm("gpt", "raw", seeds=_SEEDS),
            f"every=2, {_CHANGES}": arm("gpt", "raw", seeds=_SEEDS, every=2),
            _S1: arm("gpt", _S1, seeds=_SEEDS),
            f"every=2, {_S1}": arm("gpt", _S1, seeds=_SEEDS, every=2),
            **{codec: arm("gpt", codec) for codec in (_GROUPS, _AUTO, *_ALL)},
        },
    ),
    "resnet8": _Task(
        "ResNet-8 with SGD",
        "The workers push gradients and pull the change of the model (`ShardedOptimizer`, "
        "servers).",
        _images(
            "resnet8",
            ("3lc:s=1.75,coder=rice", arm("resnet8", "3lc:s=1.75,coder=rice", seeds=_SEEDS)),
            (f"every=4, {_S1}", arm("resnet8", _S1, seeds=_SEEDS, every=4, **_UPDATES)),
            auto="auto:bits=0.7",  # 3lc:s=1 sends more than half a bit of its pulls
            seeds=1,  # each takes ten minutes
        ),
    ),
    "lenet": _Task(
        "LeNet with SGD",
        "With dropout 0.5. As the ResNet.",
        _images(
            "lenet",
            (_GROUPS, arm("lenet", _GROUPS, seeds=_SEEDS)),
            ("3lc:s=1.50,coder=rice", arm("lenet", "3lc:s=1.50,coder=rice", seeds=_SEEDS)),
            (f"{_S1} (the hook)", arm("lenet", _S1, seeds=_SEEDS, exchange=HOOK)),
        ),
    ),
    "mlp": _Task("Perceptron with SGD", "As the ResNet.", _images("mlp")),
    "lstm": _Task(
        "LSTM with SGD",
        "Sequences of 64 bytes of Python's library, gradients clipped at norm 1. The workers' "
        "changes are compressed (`LocalSteps`).",
        {
            "uncompressed": arm("lstm", "raw", seeds=_SEEDS),
            _CHANGES: arm("lstm", "raw", seeds=_SEEDS, **_UPDATES),
            _S1: arm("lstm", _S1, seeds=_SEEDS, **_UPDATES),
            **{codec: arm("lstm", codec, **_UPDATES) for codec in (_GROUPS, _AUTO, *_ALL)},
        },
    ),
}


def _table(found: Found, arms: dict[str, Arm]) -> str:
    coded = {re.sub(r"\S+:\S+|every=\d+", r"`\g<0>`", label): one for label, one in arms.items()}
    base, *others = coded
    others.sort(key=lambda label: -(found.series(coded[label], "").bits or 0.0))
    ordered = {label: coded[label] for label in (base, *others)}
    heads, cells = ["bits, all"], {label: [found.bits_of_all(o)] for label, o in ordered.items()}
    if _CHANGES in ordered:
        heads.append("to uncompressed changes")
        for label, one in ordered.items():
            cells[label].append("" if label == base else found.difference(one, _base_of(one)))
    return accuracy_table(found, ordered, heads, cells)


def _base_of(one: Arm) -> Arm:
    """The same way to train without compression: what a codec costs is the difference to it."""
    return replace(one, codec="raw")


def _chart(found: Found, arms: dict[str, Arm]) -> Task:
    series = [found.series(one, label) for label, one in arms.items()]
    settings = found.settings[next(iter(arms.values()))]
    return Task(settings.model, settings.data, series)


EVALUATION = Evaluation(
    "frontier",
    "Bits and accuracy: codecs on five tasks",
    "What each codec sends, and what the training ends with. Bits are of a value of the compressed "
    "tensors, pushed and pulled, without headers; *all* counts headers, tensors that go raw and "
    "the four numbers a tensor that `LocalSteps` sends, too, which weigh more in small models. "
    "Left out: `bf16` and `fp16` (16 bits), `truncate` (8 to 16), `topk2bit`, and `qgd`, which is "
    "for gradient descent. *The hook*: the workers pull the average of their gradients, as with "
    "DDP's communication hook, and not the change of the model. Image models that pull changes are "
    "tested as the server has them; in runs of commits from 4472b71 on as worker 0 has them: the "
    "last seeds of `int8` and `onebit` with the ResNet. In the pictures, a codec that ends far "
    "worse than most stands on the dotted line, with its number.",
    tuple(
        Experiment(
            task.title,
            task.about,
            tuple(task.arms.values()),
            partial(_table, arms=task.arms),
            {
                name: (
                    f"{task.title}: bits of a value, and what the training ends with",
                    partial(_chart, arms=task.arms),
                )
            },
        )
        for name, task in _TASKS.items()
    ),
)
