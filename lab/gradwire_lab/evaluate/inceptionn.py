"""INCEPTIONN's evaluation (Li et al.; MICRO 2018), section VIII."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gradwire_lab.evaluate.arms import HOOK, Arm, arm
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import MISSING, Column, Found, Row, accuracy_table, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CODECS = {
    "32 bit": "raw",
    "INC, 2^-10": "inceptionn:bound=10",
    "INC, 2^-8": "inceptionn:bound=8",
    "INC, 2^-6": "inceptionn:bound=6",
    "truncation of 16 bits": "truncate:bits=16",
    "truncation of 22 bits": "truncate:bits=22",
    "truncation of 24 bits": "truncate:bits=24",
}
_BEYOND = {
    "INC, 2^-10, error feedback": "inceptionn:bound=10,ef=on",
    "INC, 2^-10, strict": "inceptionn:bound=10,mode=strict",
}
_ALL = _CODECS | _BEYOND
_REPEATED = "inceptionn:bound=10"  # with three seeds; others have two
_TASKS = ("mlp", "lenet")
_STEPS = 40
# How the workers and an aggregator, or the workers in a ring, exchange gradients. The aggregator
# sends the change of its model, which the paper does not compress.
_WAYS: dict[str, tuple[str, str]] = {
    "WA": ("server", "raw"),
    "WA+C": ("server", "inceptionn:bound=10/raw"),
    "INC": ("ring", "raw"),
    "INC+C": ("ring", "inceptionn:bound=10"),
}


def _arm(task: str, codec: str) -> Arm:
    if codec == "raw":
        return arm(task, codec, seeds=3)  # what the frontier trains, too
    return arm(task, codec, exchange=HOOK, seeds=3 if codec.startswith(_REPEATED) else 2)


def _table(found: Found, task: str) -> str:
    rows = [Row(label, _arm(task, codec)) for label, codec in _ALL.items()]
    ratio: Column = ("ratio", lambda row: found.ratio(row.arm))
    return accuracy_table(found, _arm(task, "raw"), rows, (), ratio)


# Codecs that are tried on the gradients of an uncompressed training.
_OBSERVED = {
    task: arm(task, "raw", observed=tuple(_CODECS.values())[1:], steps=2000) for task in _TASKS
}
_CLASSES = ("0", "8", "16", "32")


def _observed_mean(found: Found, task: str, label: str, key: str, name: str = "") -> float | None:
    """Over steps, and over tensors by their numbers of values. None: it was not observed."""
    observed = found.observed.get(_OBSERVED[task])
    steps = observed["codecs"][_CODECS[label]].get(key) if observed else None
    if observed is None or steps is None:
        return None
    numels = [numel for _, numel in observed["tensors"]]
    values = [[one[name] if name else one for one in of_step] for of_step in steps]
    return fmean(fmean(of_step, numels) for of_step in values)


def _shares(found: Found, task: str) -> str:
    mean = partial(_observed_mean, found, task)

    def percent(row: Row, key: str, name: str = "") -> str:
        share = mean(row.label, key, name)
        return "" if share is None else f"{100 * share:.3g} %"

    def ratio(row: Row) -> str:
        bits = mean(row.label, "bits")
        return "" if bits is None else f"{32 / bits:.3g}x"

    def of_class(name: str) -> Column:
        return f"{name} bits", lambda row: percent(row, "class_shares", name)

    columns: list[Column] = [
        ("codec", lambda row: row.label),
        *map(of_class, _CLASSES),
        ("ratio", ratio),
        ("squared error", lambda row: percent(row, "error")),
    ]
    return table(columns, [Row(label, _OBSERVED[task]) for label in list(_CODECS)[1:]])


def _draw_shares(found: Found) -> Figure | None:
    from gradwire_lab.evaluate.pictures import stacked_bars

    drawn = {}
    for task in _TASKS:
        for label in _CODECS:
            if label.startswith("INC") and _OBSERVED[task] in found.observed:
                drawn[f"{task}, {label.removeprefix('INC, ')}"] = {
                    f"{name} bits": 100
                    * (_observed_mean(found, task, label, "class_shares", name) or 0.0)
                    for name in _CLASSES
                }
    return stacked_bars(drawn, "share of the values (%)")


def _draw_ends(found: Found, task: str) -> Figure | None:
    from gradwire_lab.evaluate.pictures import final_bars

    return final_bars(found, {label: _arm(task, codec) for label, codec in _ALL.items()})


def _timed(task: str, way: str, bandwidth: str) -> Arm:
    exchange, codec = _WAYS[way]
    options: dict[str, Any] = {"workers": 4, "steps": _STEPS, "eval_every": _STEPS}
    return arm(task, codec, timed=True, seeds=2, exchange=exchange, bandwidth=bandwidth, **options)


def _times(found: Found, bandwidths: tuple[str, ...]) -> str:
    def seconds(row: Row, bandwidth: str) -> str:
        task, way = row.label.split(", ")
        taken = found.seconds_of_runs(_timed(task, way, bandwidth))
        base = found.seconds_a_step(_timed(task, "WA", bandwidth))
        if not taken or base is None:
            return MISSING
        mean = fmean(taken)
        return f"{mean:.3f} s ({min(taken):.3f} to {max(taken):.3f}), {mean / base:.2f}"

    def column(bandwidth: str) -> Column:
        return bandwidth, lambda row: seconds(row, bandwidth)

    def bits(row: Row) -> str:
        task, way = row.label.split(", ")
        return found.bits(_timed(task, way, bandwidths[0]))

    rows = [
        Row(f"{task}, {way}", _timed(task, way, bandwidths[0])) for task in _TIMED for way in _WAYS
    ]
    columns: list[Column] = [("model, way", lambda row: row.label), ("bits", bits)]
    return table([*columns, *map(column, bandwidths)], rows)


def _draw_times(found: Found) -> Figure | None:
    from gradwire_lab.evaluate.pictures import Bar, grouped_bars

    drawn = {}
    for task in _TIMED:
        for bandwidth in _BANDWIDTHS:
            base = found.seconds_a_step(_timed(task, "WA", bandwidth))
            ways = {way: found.seconds_of_runs(_timed(task, way, bandwidth)) for way in _WAYS}
            if base is not None:
                drawn[f"{task}, {bandwidth}"] = {
                    way: Bar(*(of(seconds) / base for of in (fmean, min, max)))
                    for way, seconds in ways.items()
                    if seconds
                }
    return grouped_bars(drawn, "time of a step, as a share of WA's", form="{:.2f}")


_TIMED = ("mlp", "lenet")
_PAPER = {
    "mlp": "The paper's perceptron of 5 layers on handwritten digits bears truncation.",
    "lenet": "The paper's convolutional networks do not bear truncation.",
}
_BANDWIDTHS = ("100mbit", "1gbit")

EVALUATION = Evaluation(
    "inceptionn",
    "INCEPTIONN: its evaluation, here",
    "Li et al.: INCEPTIONN (MICRO 2018), section VIII. The codec in software; the paper's is in a "
    "network card (`rtl/` in the repository). Gradients are compressed on the way to their sum, "
    "and the average on the way back.",
    (
        *(
            Experiment(
                f"Ratio and accuracy: {task}",
                f"{_PAPER[task]} Error feedback sends later what was cut off; *strict* errs by at "
                "most the bound, where the paper's codec errs by up to 2^-7 in values that take 8 "
                "bits. Neither is in the paper. The dotted line of the picture is 32 bit.",
                tuple(_arm(task, codec) for codec in _ALL.values()),
                partial(_table, task=task),
                {
                    f"accuracy-{task}": (
                        f"{task}: accuracy with each bound, and with truncation",
                        partial(_draw_ends, task=task),
                    )
                },
            )
            for task in _TASKS
        ),
        *(
            Experiment(
                f"Shares of the classes and error: {task}",
                "Of the gradients of an uncompressed training, at 40 steps: the share of the "
                "values that take 0, 8, 16 and 32 bits beside their 2-bit tag, and the squared "
                "error as a share of the squared norm.",
                (_OBSERVED[task],),
                partial(_shares, task=task),
                {"classes": ("shares of the classes", _draw_shares)} if task == _TASKS[-1] else {},
            )
            for task in _TASKS
        ),
        Experiment(
            "Times: WA, WA+C, INC, INC+C",
            f"Seconds of a step, with the two runs in brackets, and the share of WA's, on shaped "
            f"links, 4 workers, in the first {_STEPS} steps of a training, whose bits a value are "
            "not those of all of it. "
            "WA: an aggregator (one server). INC: a ring. +C: gradients are compressed with bound "
            "2^-10; in WA only on the way to the aggregator.",
            tuple(_timed(task, way, b) for b in _BANDWIDTHS for task in _TIMED for way in _WAYS),
            partial(_times, bandwidths=_BANDWIDTHS),
            {"times": ("time of a step, as a share of WA's", _draw_times)},
        ),
    ),
)
