"""QSGD's evaluation (Alistarh, Grubic, Li, Tomioka, Vojnovic; NIPS 2017), section 5."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire.evaluate.arms import HOOK, Arm, arm
from gradwire.evaluate.evaluation import Evaluation, Experiment
from gradwire.evaluate.found import Found, Row, accuracy_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of pushes/pulls. Gradients that are broadcast are quantized once: their average is exact.
_CODECS = {
    "32 bit": "raw",
    "QSGD, 8 bit, buckets of 512": "qsgd:bits=8,bucket=512/raw",
    "QSGD, 4 bit, buckets of 512": "qsgd:bits=4,bucket=512/raw",
    "QSGD, 4 bit, buckets of 8192": "qsgd:bits=4,bucket=8192/raw",
    "QSGD, 2 bit, buckets of 64": "qsgd:bits=2,bucket=64/raw",
    "1-bit SGD": "onebit",
    "1-bit SGD, buckets of 512": "onebit:bucket=512",
}
_DRAWN = tuple(label for label in _CODECS if label not in ("QSGD, 4 bit, buckets of 8192",))
_REPEATED = ("mlp", "mlp, Adam")  # with three seeds; others have two
_TASKS: dict[str, dict[str, Any]] = {
    "resnet8": {},
    "lstm": {},
    "mlp": {},
    "mlp, Adam": {"optimizer": "adam", "weight_decay": 0.0, "compress": "gradients"},
}


def _arm(task: str, codec: str) -> Arm:
    model, options = task.partition(",")[0], _TASKS[task]
    if codec == "raw" and not options:
        return arm(model, codec, seeds=3)  # what the frontier trains, too
    return arm(model, codec, exchange=HOOK, seeds=3 if task in _REPEATED else 2, **options)


def _table(found: Found, task: str) -> str:
    rows = [Row(label, _arm(task, codec)) for label, codec in _CODECS.items()]
    return accuracy_table(found, _arm(task, "raw"), rows)


def _figure(found: Found, task: str, of_loss: bool) -> Figure | None:
    from gradwire.evaluate.pictures import over_steps

    return over_steps(
        found, {label: _arm(task, _CODECS[label]) for label in _DRAWN}, of_loss=of_loss
    )


_PAPER = {
    "resnet8": "The paper (ResNet-110 on CIFAR-10, ResNets and AlexNet on ImageNet): 8 bits with "
    "buckets of 512 recover the accuracy of 32 bits or exceed it; 2 bits hurt convolutional layers "
    "most. On AlexNet 2 bits with buckets of 64 lose 1.73 points, 4 bits with buckets of 8192 lose "
    "0.68.",
    "lstm": "The paper's LSTM (on AN4) keeps its accuracy.",
    "mlp": "The paper's two-layer perceptron (on MNIST) keeps its accuracy.",
    "mlp, Adam": "With Adam, which the paper does not try: it divides by squares of gradients, so "
    "the noise of few levels makes its steps smaller.",
}

EVALUATION = Evaluation(
    "qsgd",
    "QSGD: its evaluation, here",
    "Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD (NIPS 2017), section 5: table 1 and figure 3. "
    "The paper broadcasts each gradient, which is quantized once. Here it is pushed to the "
    "average, which is pulled uncompressed, in 32 bits: the values are the same. 1-bit SGD "
    "compresses both ways, with residuals (Seide et al. 2014).",
    tuple(
        Experiment(
            f"Table 1 and figure 3: {task}",
            _PAPER[task],
            tuple(_arm(task, codec) for codec in _CODECS.values()),
            partial(_table, task=task),
            {
                f"figure-3-{task.replace(', ', '-').lower()}{end}": (
                    f"{task}: {what} over steps",
                    partial(_figure, task=task, of_loss=of_loss),
                )
                for end, what, of_loss in (
                    ("", "what the evaluations measure", False),
                    ("-loss", "training loss", True),
                )
            },
        )
        for task in _TASKS
    ),
)
