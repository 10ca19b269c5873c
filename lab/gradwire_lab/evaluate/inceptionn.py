"""INCEPTIONN's evaluation (Li et al.; MICRO 2018), section VIII."""

from __future__ import annotations

from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from gradwire_lab.evaluate.arms import HOOK, Arm, arm
from gradwire_lab.evaluate.charts import Bar, Bars, bar_of, bars_of_ends
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import MISSING, Found, accuracy_table, table

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


def _arms(task: str) -> dict[str, Arm]:
    return {label: _arm(task, codec) for label, codec in _ALL.items()}


def _table(found: Found, task: str) -> str:
    arms = _arms(task)
    ratios = {label: [found.ratio(one)] for label, one in arms.items()}
    return accuracy_table(found, arms, ["ratio"], ratios)


def _chart(found: Found, task: str) -> Bars:
    return bars_of_ends(found, _arms(task))


# Codecs that are tried on the gradients of an uncompressed training.
_OBSERVED = {
    task: arm(task, "raw", observed=tuple(_CODECS.values())[1:], steps=2000) for task in _TASKS
}
_CLASSES = ("0", "8", "16", "32")


def _observed_means(found: Found, task: str, label: str) -> dict[str, float]:
    """Over steps, and over tensors by their numbers of values: of the bits, the error, and each
    class that the codec has. Nothing if it was not observed."""
    if _OBSERVED[task] not in found.observed:
        return {}
    observed = found.observed[_OBSERVED[task]]
    numels = [numel for _, numel in observed.tensors]
    seen = observed.codecs[_CODECS[label]]
    values = {name: seen[name] for name in ("bits", "error")}
    for name in _CLASSES if "class_shares" in seen else ():
        values[name] = [[shares[name] for shares in step] for step in seen["class_shares"]]
    return {
        name: fmean(fmean(of_step, numels) for of_step in steps) for name, steps in values.items()
    }


def _shares(found: Found, task: str) -> str:
    rows = []
    for label in list(_CODECS)[1:]:
        means = _observed_means(found, task, label)
        percents = [
            f"{100 * means[name]:.3g} %" if name in means else "" for name in (*_CLASSES, "error")
        ]
        ratio = f"{32 / means['bits']:.3g}x" if means else ""
        rows.append([label, *percents[:-1], ratio, percents[-1]])
    classes = [f"{name} bits" for name in _CLASSES]
    return table(["codec", *classes, "ratio", "squared error"], rows)


def _chart_of_shares(found: Found) -> Bars:
    drawn: dict[str, dict[str, Bar]] = {}
    for task in _TASKS:
        for label in _CODECS:
            if label.startswith("INC") and (means := _observed_means(found, task, label)):
                drawn[f"{task}, {label.removeprefix('INC, ')}"] = {
                    f"{name} bits": bar_of([100 * means[name]]) for name in _CLASSES
                }
    return Bars(drawn, "share of the values (%)", stacked=True)


def _timed(task: str, way: str, bandwidth: str) -> Arm:
    exchange, codec = _WAYS[way]
    options: dict[str, Any] = {"workers": 4, "steps": _STEPS, "eval_every": _STEPS}
    return arm(task, codec, timed=True, seeds=2, exchange=exchange, bandwidth=bandwidth, **options)


def _times(found: Found) -> str:
    def seconds(task: str, way: str, bandwidth: str) -> str:
        taken = found.seconds_of_runs(_timed(task, way, bandwidth))
        base = found.seconds_a_step(_timed(task, "WA", bandwidth))
        if not taken or base is None:
            return MISSING
        mean = fmean(taken)
        return f"{mean:.3f} s ({min(taken):.3f} to {max(taken):.3f}), {mean / base:.2f}"

    rows = (
        [
            f"{task}, {way}",
            found.bits(_timed(task, way, _BANDWIDTHS[0])),
            *(seconds(task, way, bandwidth) for bandwidth in _BANDWIDTHS),
        ]
        for task, way in product(_TASKS, _WAYS)
    )
    return table(["model, way", "bits", *_BANDWIDTHS], rows)


def _chart_of_times(found: Found) -> Bars:
    drawn = {}
    for task, bandwidth in product(_TASKS, _BANDWIDTHS):
        base = found.seconds_a_step(_timed(task, "WA", bandwidth))
        ways = {way: found.seconds_of_runs(_timed(task, way, bandwidth)) for way in _WAYS}
        if base is not None:
            drawn[f"{task}, {bandwidth}"] = {
                way: bar_of([one / base for one in seconds])
                for way, seconds in ways.items()
                if seconds
            }
    return Bars(drawn, "time of a step, as a share of WA's", form="{:.2f}")


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
                tuple(_arms(task).values()),
                partial(_table, task=task),
                {
                    f"accuracy-{task}": (
                        f"{task}: accuracy with each bound, and with truncation",
                        partial(_chart, task=task),
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
                {"classes": ("shares of the classes", _chart_of_shares)}
                if task == _TASKS[-1]
                else {},
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
            tuple(_timed(task, way, b) for b, task, way in product(_BANDWIDTHS, _TASKS, _WAYS)),
            _times,
            {"times": ("time of a step, as a share of WA's", _chart_of_times)},
        ),
    ),
)
