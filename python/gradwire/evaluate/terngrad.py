"""TernGrad's evaluation (Wen et al.; NeurIPS 2017), section 4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.evaluate.arms import HOOK, Arm, arm
from gradwire.evaluate.evaluation import Evaluation, Experiment
from gradwire.evaluate.found import Column, Found, Row, accuracy_table, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CODECS = {"floating": "raw", "TernGrad": "terngrad", "TernGrad, no clipping": "terngrad:clip=0"}

# Figure 3: the total batch stays, the number of workers grows.
_WORKERS = (2, 4, 16, 64)
_TOTAL_BATCH, _RATE = 64, 0.01
_STEPS = 4000


def _of_workers(workers: int, codec: str) -> Arm:
    options: dict[str, Any] = {
        "workers": workers,
        "batch": _TOTAL_BATCH // workers,
        "learning_rate": _RATE / workers,  # gradwire train multiplies it by the workers
        "schedule": "poly",
        "steps": _STEPS,
        "ema": 0.999,
    }
    return arm("lenet", codec, exchange=HOOK, **options)


def _by_workers(found: Found) -> str:
    def column(label: str) -> Column:
        return label, lambda row: found.text(_of_workers(int(row.label), _CODECS[label]))

    rows = [Row(str(workers), _of_workers(workers, "raw")) for workers in _WORKERS]
    return table([("workers", lambda row: row.label), *map(column, _CODECS)], rows)


def _figure_3(found: Found) -> Figure:
    from gradwire.evaluate.pictures import lines

    drawn = {}
    for label, codec in _CODECS.items():
        means = [(workers, found.mean(_of_workers(workers, codec))) for workers in _WORKERS]
        points = [(workers, 100 * mean) for workers, mean in means if mean is not None]
        drawn[label] = [x for x, _ in points], [y for _, y in points]
    return lines(drawn, "workers", "test accuracy (%)", logarithmic="x", markers=True)


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
    return arm("lenet", codec, exchange=HOOK, **options)


_TABLE_1 = {
    (2, "floating"): ("86.56 %", ""),
    (2, "TernGrad"): ("85.64 %", "-0.92"),
    (16, "floating"): ("83.19 %", ""),
    (16, "TernGrad"): ("82.80 %", "-0.39"),
}


def _table_1(found: Found) -> str:
    tables = []
    for workers in _ADAM:
        rows = [
            Row(f"{label}, {workers} workers", _adam(workers, _CODECS[label]), theirs)
            for (own, label), theirs in _TABLE_1.items()
            if own == workers
        ]
        base = _adam(workers, "raw")
        tables.append(accuracy_table(found, base, rows, ("paper: CifarNet", "difference")))
    return "\n\n".join(tables)


# Table 2: dropout, clipping, and larger batches by more workers, with as many epochs.
_ALEXNET = {
    (2, "floating", 0.5): "57.33 %",
    (2, "TernGrad", 0.2): "57.61 %",
    (2, "TernGrad, no clipping", 0.2): "54.63 %",
    (4, "floating", 0.5): "57.32 %",
    (4, "TernGrad", 0.2): "57.28 %",
    (8, "floating", 0.5): "56.62 %",
    (8, "TernGrad", 0.2): "57.54 %",
}


def _dropping(workers: int, codec: str, dropout: float) -> Arm:
    steps = 16000 // workers
    options: dict[str, Any] = {"workers": workers, "dropout": dropout, "steps": steps}
    return arm("lenet", codec, exchange=HOOK, **options)


def _table_2(found: Found) -> str:
    rows = [
        Row(
            f"{label}, {workers} workers, dropout {dropout}",
            _dropping(workers, _CODECS[label], dropout),
            (theirs,),
        )
        for (workers, label, dropout), theirs in _ALEXNET.items()
    ]
    return accuracy_table(found, rows[0].arm, rows, ("paper: AlexNet, top 1",))


EVALUATION = Evaluation(
    "terngrad",
    "TernGrad: its evaluation, here",
    "Wen et al.: TernGrad (NeurIPS 2017), section 4. The paper trains LeNet on MNIST, CifarNet on "
    "CIFAR-10, AlexNet and GoogLeNet on ImageNet; here it is LeNet. The average "
    "gradient, too, is sent in three levels, with draws of its own; the paper's comes back in "
    "2N + 1 levels.",
    (
        Experiment(
            "Figure 3: more workers, the same total batch",
            f"SGD with momentum, a batch of {_TOTAL_BATCH} in all, learning rate {_RATE:g}, "
            f"polynomial decay, {_STEPS} steps. The paper: 0.15 points better to 0.22 points worse "
            "than floating gradients, with up to 64 workers.",
            tuple(_of_workers(w, codec) for w in _WORKERS for codec in _CODECS.values()),
            _by_workers,
            {"figure-3": ("accuracy over the number of workers", _figure_3)},
        ),
        Experiment(
            "Table 1: Adam, the same batch of each worker",
            "As many epochs with 2 workers as with 16.",
            tuple(_adam(w, _CODECS[label]) for w, label in _TABLE_1),
            _table_1,
        ),
        Experiment(
            "Table 2: dropout and clipping",
            "A batch of 32 of each worker, as many epochs in each row.",
            tuple(_dropping(w, _CODECS[label], dropout) for w, label, dropout in _ALEXNET),
            _table_2,
        ),
    ),
)
