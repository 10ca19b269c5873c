"""TernGrad's evaluation (Wen et al.; NeurIPS 2017), section 4."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from gradwire_lab.evaluate.arms import HOOK, Arm, arm
from gradwire_lab.evaluate.charts import Histograms, Line, Lines, line_through, lines_over_steps
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import Found, accuracy_table, table
from gradwire_lab.train.settings import TrainSettings

# Of pushes/pulls. The paper's sum of trits is exact, as is the uncompressed average. The runs of
# these codecs are of commits before 4472b71, when each worker had a scale of its own; a server that
# averages lets them share one since.
_CODECS = {
    "floating": "raw",
    "TernGrad": "terngrad/raw",
    "TernGrad, no clipping": "terngrad:clip=0/raw",
}
_BOTH_WAYS = "TernGrad, pulls ternary, too"  # as the hook's exchange `sharded`

# Figure 3: the total batch stays, the number of workers grows.
_WORKERS = (2, 4, 16, 64)
_TOTAL_BATCH = 64
_RATES = {0.9: 0.01, 0.0: 0.1}  # of a momentum, and without: (a) and (b)
_STEPS = 4000
_OF_WORKERS = _CODECS | {_BOTH_WAYS: "terngrad"}
_SEEDS = {2: 2, 4: 3, 16: 2, 64: 1}  # by workers: runs of 64 take 20 times as long as runs of 2
# As in the paper: no crops and flips, its steps and average, and scales that all workers share, so
# that the average that is pulled is exact.
_AS_PUBLISHED: dict[str, Any] = {"augment": "none", "ema": 0.9999}
_PUBLISHED_STEPS = 10000
_SHARED_SCALES = {
    "floating": "raw",
    "TernGrad": "terngrad",
    "TernGrad, no clipping": "terngrad:clip=0",
}


def _as_published(workers: int, codec: str, momentum: float) -> Arm:
    short = _of_workers(workers, codec, momentum)
    options = dict(short.changes) | _AS_PUBLISHED | {"steps": _PUBLISHED_STEPS}
    return arm("lenet", codec, seeds=3, **options)


def _of_workers(workers: int, codec: str, momentum: float) -> Arm:
    options: dict[str, Any] = {
        "workers": workers,
        "batch": _TOTAL_BATCH // workers,
        "learning_rate": _RATES[momentum] / workers,  # gradwire train multiplies it by the workers
        "schedule": "poly",
        "steps": _STEPS,
        "ema": 0.999,
    }
    if momentum != TrainSettings.momentum:
        options["momentum"] = momentum
    return arm("lenet", codec, exchange=HOOK, seeds=_SEEDS[workers], **options)


Ends = Callable[[int, str, float], Arm]  # by workers, codec and momentum


def _by_workers(found: Found, one: Ends, codecs: dict[str, str], momentum: float) -> str:
    """In brackets the difference to the first codec, in the last column what clipping takes."""
    order = ("TernGrad, no clipping", "TernGrad")
    rows = []
    for workers in _WORKERS:
        base, *others = (one(workers, codec, momentum) for codec in codecs.values())
        cells = [found.text(base)]
        for other in others:
            difference = found.difference(other, base)
            cells.append(found.text(other) + (f" ({difference})" if difference else ""))
        unclipped, clipped = (one(workers, codecs[label], momentum) for label in order)
        rows.append([str(workers), *cells, found.difference(unclipped, clipped)])
    return table(["workers", *codecs, "no clipping, to TernGrad"], rows)


def _accuracy_of_workers(found: Found, one: Ends, codecs: dict[str, str], momentum: float) -> Lines:
    drawn: dict[str, Line] = {}
    for label, codec in codecs.items():
        beside = 1.03 ** len(drawn)  # so that the spreads of the lines don't hide each other
        ends = [(w, found.ends(one(w, codec, momentum))) for w in _WORKERS]
        drawn[label] = line_through([(beside * w, values) for w, values in ends if values])
    return Lines(drawn, "workers", "test accuracy (%)", logarithmic=True, markers=True)


# Table 1: Adam, the batch of a worker stays.
_ADAM = {2: 8000, 16: 1000}  # steps with so many workers


def _adam(workers: int, codec: str) -> Arm:
    options: dict[str, Any] = {
        "workers": workers,
        "optimizer": "adam",
        "compress": "gradients",
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "steps": _ADAM[workers],
    }
    return arm("lenet", codec, exchange=HOOK, seeds=2, **options)


# Rows of a table: each with an arm and the paper's numbers.
Rows = dict[str, tuple[Arm, tuple[str, str]]]

_TABLE_1: Rows = {
    f"{label}, {workers} workers": (_adam(workers, _CODECS[label]), theirs)
    for workers, label, theirs in (
        (2, "floating", ("86.56 %", "")),
        (2, "TernGrad", ("85.64 %", "-0.92")),
        (16, "floating", ("83.19 %", "")),
        (16, "TernGrad", ("82.80 %", "-0.39")),
    )
}


def _by_equal_workers(found: Found, rows: Rows, theirs: str) -> str:
    """A table for each number of workers, whose first row is the base of its differences."""
    groups: dict[int, dict[str, Arm]] = {}
    for label, (one, _) in rows.items():
        groups.setdefault(found.settings[one].workers, {})[label] = one
    cells = {label: numbers for label, (_, numbers) in rows.items()}
    heads = (theirs, "paper: difference")
    return "\n\n".join(accuracy_table(found, arms, heads, cells) for arms in groups.values())


# Table 2: dropout, clipping, and larger batches by more workers, with as many epochs.
_LAST_RAW = "TernGrad, last layer raw"  # section 4.2 suggests it


def _dropping(workers: int, label: str, dropout: float) -> Arm:
    steps = 16000 // workers
    options: dict[str, Any] = {"workers": workers, "dropout": dropout, "steps": steps}
    if label == _LAST_RAW:
        options["exclude_last"] = 1
    codec = _CODECS.get(label, _CODECS["TernGrad"])
    return arm("lenet", codec, exchange=HOOK, seeds=2, **options)


_TABLE_2: Rows = {
    f"{label}, {w} workers, dropout {dropout}": (_dropping(w, label, dropout), theirs)
    for w, label, dropout, theirs in (
        (2, "floating", 0.5, ("57.33 %", "")),
        (2, "floating", 0.2, ("", "")),
        (2, "TernGrad", 0.2, ("57.61 %", "+0.28")),
        (2, "TernGrad, no clipping", 0.2, ("54.63 %", "-2.70")),
        (2, _LAST_RAW, 0.2, ("", "")),
        (4, "floating", 0.5, ("57.32 %", "")),
        (4, "TernGrad", 0.2, ("57.28 %", "-0.04")),
        (8, "floating", 0.5, ("56.62 %", "")),
        (8, "TernGrad", 0.2, ("57.54 %", "+0.92")),
    )
}

# Figures 2 and 4.
_OBSERVED = arm("lenet", _CODECS["TernGrad"], observed=("terngrad",), exchange=HOOK, steps=_STEPS)


def _distributions(found: Found) -> Histograms:
    drawn = found.observed[_OBSERVED].histograms if _OBSERVED in found.observed else {}
    titles = {"decoded": "ternary", "average": "average of the workers"}
    named = {
        tensor: {titles.get(key, key): values for key, values in shares.items()}
        for tensor, shares in drawn.items()
    }
    return Histograms(named, "standard deviations")


def _over_steps(found: Found, of_loss: bool) -> Lines:
    shown = (("floating", 0.5), ("TernGrad", 0.2))
    arms = {f"{label}, dropout {dropout}": _dropping(4, label, dropout) for label, dropout in shown}
    return lines_over_steps(found, arms, of_loss=of_loss)


def _sparsity(found: Found) -> Lines:
    drawn = {}
    if (observed := found.observed.get(_OBSERVED)) is not None:
        shares = observed.codecs["terngrad"]["density"]
        for index, (tensor, numel) in enumerate(observed.tensors):
            zeros = [100 * (1 - of_step[index]) for of_step in shares]
            drawn[f"{tensor}, {numel:,} values"] = Line(observed.steps, zeros)
    return Lines(drawn, "step", "values that are 0 (%)")


def _of_figure_3(
    title: str, picture: str, one: Ends, codecs: dict[str, str], momentum: float, about: str
) -> Experiment:
    return Experiment(
        title,
        about,
        tuple(one(w, codec, momentum) for w, codec in product(_WORKERS, codecs.values())),
        partial(_by_workers, one=one, codecs=codecs, momentum=momentum),
        {
            picture: (
                f"accuracy over the number of workers: {title}",
                partial(_accuracy_of_workers, one=one, codecs=codecs, momentum=momentum),
            )
        },
    )


EVALUATION = Evaluation(
    "terngrad",
    "TernGrad: its evaluation, here",
    "Wen et al.: TernGrad (NeurIPS 2017), section 4. The paper trains LeNet on MNIST, CifarNet on "
    "CIFAR-10, AlexNet and GoogLeNet (table 3) on ImageNet; here it is LeNet. In figure "
    "3 all workers share the largest of their scales, and pull the average exactly, in 2N + 1 "
    "levels, as in the paper. Elsewhere each worker has its own scale, and the average comes back "
    "in 32 bits.",
    (
        _of_figure_3(
            "Figure 3 (a): SGD with momentum",
            "figure-3",
            _as_published,
            _SHARED_SCALES,
            0.9,
            f"More workers, the same total batch of {_TOTAL_BATCH}; learning rate {_RATES[0.9]:g}, "
            "polynomial decay, weights averaged with 0.9999 a step, images as they are, scales "
            "that all workers share: as in the paper, which has 0.15 points better to 0.22 points "
            "worse than floating gradients, with up to 64 workers. Dropout 0.5; the paper does not "
            "say its own.",
        ),
        _of_figure_3(
            "Figure 3 (b): SGD without momentum",
            "figure-3b",
            _as_published,
            _SHARED_SCALES,
            0.0,
            f"The same with the paper's learning rate of {_RATES[0.0]:g}.",
        ),
        _of_figure_3(
            "Crops, flips and scales of each worker, with momentum",
            "own-scales",
            _of_workers,
            _OF_WORKERS,
            0.9,
            f"As figure 3 (a), but with {_STEPS:,} steps, weights averaged with 0.999, images "
            "cropped and flipped, and a scale of each worker's own. In the last column the "
            "average, too, is sent in three levels, with draws of its own.",
        ),
        _of_figure_3(
            "Crops, flips and scales of each worker, without momentum",
            "own-scales-b",
            _of_workers,
            _OF_WORKERS,
            0.0,
            f"The same with the learning rate of {_RATES[0.0]:g}.",
        ),
        Experiment(
            "Table 1: Adam, the same batch of each worker",
            "As many epochs with 2 workers as with 16; learning rate 0.001 (the paper: 0.0002). "
            "Here and below, unlike in the paper, weights are not averaged over steps.",
            tuple(one for one, _ in _TABLE_1.values()),
            partial(_by_equal_workers, rows=_TABLE_1, theirs="paper: CifarNet"),
        ),
        Experiment(
            "Table 2: dropout and clipping",
            "A batch of 32 of each worker, as many epochs in each row. The paper's top-5 accuracy "
            "has no counterpart with ten classes.",
            tuple(one for one, _ in _TABLE_2.values()),
            partial(_by_equal_workers, rows=_TABLE_2, theirs="paper: AlexNet, top 1"),
        ),
        Experiment(
            "Figure 2: histograms of gradients",
            "In the middle of the training: worker 0's gradient, clipped, ternary, and the average "
            "of the workers' ternary gradients. The paper shows them over all steps, with 2 "
            "workers; here it is one step.",
            (_OBSERVED,),
            figures={"figure-2": ("histograms of the gradients of two tensors", _distributions)},
        ),
        Experiment(
            "Figure 4: during a training",
            "Accuracy and loss: the mean of the seeds, and their spread; zeros: seed 0. In the "
            "paper 71 % of fc6 of AlexNet are zeros on average, with 4 workers.",
            (_dropping(4, "floating", 0.5), _dropping(4, "TernGrad", 0.2), _OBSERVED),
            figures={
                "figure-4-accuracy": ("accuracy", partial(_over_steps, of_loss=False)),
                "figure-4-loss": ("training loss", partial(_over_steps, of_loss=True)),
                "figure-4-sparsity": ("share of the values that are 0", _sparsity),
            },
        ),
    ),
)
