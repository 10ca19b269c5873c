"""INCEPTIONN's evaluation (Li et al.; MICRO 2018), section VIII."""

from __future__ import annotations

from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from gradwire_lab.evaluate.arms import HOOK, TASKS, Arm, arm
from gradwire_lab.evaluate.charts import Bar, Bars, bar_of, bars_of_ends
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import MISSING, Found, accuracy_table, table, with_interval

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
_SEEDS = 3
_TASKS = ("mlp", "lenet")
_STEPS = 40
_BANDWIDTHS = ("100mbit", "1gbit")
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
        return arm(task, codec, seeds=_SEEDS)  # what the frontier trains, too
    return arm(task, codec, exchange=HOOK, seeds=_SEEDS)


def _arms(task: str) -> dict[str, Arm]:
    return {label: _arm(task, codec) for label, codec in _ALL.items()}


# The bound is absolute, so the scale of the gradient decides. 32: the gradient of the sum of a
# batch's losses. The exchange is the one that is timed.
_SCALES = (1, 4, 32, 128)
_SUM = 32
_LONGER = (1.25, 1.5, 2.0)
_INC = "inceptionn:bound=10"
_RING = "32 bit, in a ring"


def _on_ring(task: str, scale: int, longer: float = 1.0) -> Arm:
    options: dict[str, Any] = {"exchange": "ring", "bandwidth": "none"}
    if scale != 1:
        options["loss_scale"] = float(scale)
    if longer != 1.0:
        options["steps"] = round(TASKS[task]["steps"] * longer)
    return arm(task, _INC, seeds=_SEEDS, **options)


def _by_scale(found: Found, task: str) -> str:
    arms = {"32 bit": _arm(task, "raw")}
    arms |= {f"INC, 2^-10, gradients times {scale}": _on_ring(task, scale) for scale in _SCALES}
    ratios = {label: [found.ratio(one)] for label, one in arms.items()}
    return accuracy_table(found, arms, ["ratio"], ratios)


def _by_steps(found: Found, task: str) -> str:
    """How many steps bring INC to the accuracy of 32 bit, and what that leaves of its speed."""
    arms = {"32 bit": _arm(task, "raw"), _RING: _arm(task, "raw")}
    arms["INC, 2^-10"] = _on_ring(task, _SUM)
    arms |= {f"INC, {x:g} times the steps": _on_ring(task, _SUM, x) for x in _LONGER}
    cells: dict[str, list[str]] = {}
    for label, one in arms.items():
        longer = found.settings[one].steps / found.settings[arms["32 bit"]].steps
        way = {"32 bit": "WA", _RING: "INC"}.get(label, "INC+C")
        cells[label] = [_faster(found, task, way, b, longer) for b in _BANDWIDTHS]
    heads = [f"speed-up over WA, {bandwidth}" for bandwidth in _BANDWIDTHS]
    return accuracy_table(found, arms, heads, cells)


def _faster(found: Found, task: str, way: str, bandwidth: str, longer: float) -> str:
    own = _timed(task, way, bandwidth, _SUM if way == "INC+C" else 1)
    return found.speed_up(own, _timed(task, "WA", bandwidth), longer)


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
_OBSERVED_SCALES = {
    (task, scale): arm(task, "raw", observed=(_INC,), steps=2000, loss_scale=float(scale))
    for task, scale in product(_TASKS, _SCALES[1:])
}
_IN_SOFTWARE = {"SZ3, 2^-10": "sz3:bound=10", "INC in software, 2^-10": _INC}
_OBSERVED_SOFTWARE = {
    task: arm(task, "raw", observed=tuple(_IN_SOFTWARE.values()), steps=2000, loss_scale=32.0)
    for task in _TASKS
}
_CLASSES = ("0", "8", "16", "32")


def _observed_means(found: Found, one: Arm, codec: str) -> dict[str, float]:
    """Over steps, and over tensors by their numbers of values: of the bits, the error, and each
    class that the codec has. Nothing if it was not observed."""
    if one not in found.observed:
        return {}
    observed = found.observed[one]
    numels = [numel for _, numel in observed.tensors]
    seen = observed.codecs[codec]
    values = {name: seen[name] for name in ("bits", "error")}
    for name in _CLASSES if "class_shares" in seen else ():
        values[name] = [[shares[name] for shares in step] for step in seen["class_shares"]]
    return {
        name: fmean(fmean(of_step, numels) for of_step in steps) for name, steps in values.items()
    }


def _shares(found: Found, task: str) -> str:
    observed = {label: (_OBSERVED[task], _CODECS[label]) for label in list(_CODECS)[1:]}
    observed |= {
        f"INC, 2^-10, gradients times {scale}": (_OBSERVED_SCALES[task, scale], _INC)
        for scale in _SCALES[1:]
    }
    rows = []
    for label, (one, codec) in observed.items():
        means = _observed_means(found, one, codec)
        percents = [
            f"{100 * means[name]:.3g} %" if name in means else "" for name in (*_CLASSES, "error")
        ]
        ratio = f"{32 / means['bits']:.3g}x" if means else ""
        rows.append([label, *percents[:-1], ratio, percents[-1]])
    classes = [f"{name} bits" for name in _CLASSES]
    return table(["codec", *classes, "ratio", "squared error"], rows)


def _software(found: Found) -> str:
    """What encoding and decoding in software add to a step of WA, whose aggregator receives from
    all workers, and what their bits take from it."""
    rows = []
    for task, (label, codec) in product(_TASKS, _IN_SOFTWARE.items()):
        means = _observed_means(found, one := _OBSERVED_SOFTWARE[task], codec)
        if not means:
            rows.append([f"{task}, {label}", *[MISSING] * (3 + len(_BANDWIDTHS))])
            continue
        observed = found.observed[one]
        values = sum(numel for _, numel in observed.tensors)
        seconds = fmean(sum(of_step) for of_step in observed.codecs[codec]["seconds"])
        cells = [f"{32 / means['bits']:.3g}x", f"{100 * means['error']:.3g} %"]
        cells.append(f"{1e3 * seconds:.3g} ms")
        for bandwidth in _BANDWIDTHS:
            step = found.seconds_a_step(base := _timed(task, "WA", bandwidth))
            settings = found.settings[base]
            if step is None or settings.bandwidth is None:
                cells.append(MISSING)
                continue
            saved = settings.workers * values * (32 - means["bits"]) / settings.bandwidth
            added = (settings.workers + 1) / 2 * seconds  # a worker encodes, the aggregator decodes
            cells.append(f"{(step - saved + added) / step:.2f}")
        rows.append([f"{task}, {label}", *cells])
    heads = ("ratio", "squared error", "encode and decode", *_BANDWIDTHS)
    return table(["model, codec", *heads], rows)


def _chart_of_shares(found: Found) -> Bars:
    drawn: dict[str, dict[str, Bar]] = {}
    for task in _TASKS:
        for label in (label for label in _CODECS if label.startswith("INC")):
            if means := _observed_means(found, _OBSERVED[task], _CODECS[label]):
                drawn[f"{task}, {label.removeprefix('INC, ')}"] = {
                    f"{name} bits": bar_of([100 * means[name]]) for name in _CLASSES
                }
    return Bars(drawn, "share of the values (%)", stacked=True)


def _timed(task: str, way: str, bandwidth: str, scale: int = 1) -> Arm:
    exchange, codec = _WAYS[way]
    options: dict[str, Any] = {"workers": 4, "steps": _STEPS, "eval_every": _STEPS}
    if scale != 1:
        options["loss_scale"] = float(scale)
    return arm(
        task, codec, timed=True, seeds=_SEEDS, exchange=exchange, bandwidth=bandwidth, **options
    )


def _times(found: Found) -> str:
    def seconds(task: str, way: str, bandwidth: str) -> str:
        taken = list(found.seconds_of_runs(_timed(task, way, bandwidth)).values())
        base = found.seconds_a_step(_timed(task, "WA", bandwidth))
        if not taken or base is None:
            return MISSING
        return f"{with_interval(taken)} s, {fmean(taken) / base:.2f}"

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
                way: bar_of([one / base for one in seconds.values()])
                for way, seconds in ways.items()
                if seconds
            }
    return Bars(drawn, "time of a step, as a share of WA's", form="{:.2f}")


_PAPER = {
    "mlp": "The paper's perceptron on handwritten digits bears truncation.",
    "lenet": "The paper's convolutional networks do not bear truncation.",
}

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
                f"Scale of the gradient: {task}",
                "The loss times 1, 4, 32 and 128, and the step of SGD divided by as much, so that "
                "without compression nothing changes. 32: the gradient of the sum of a batch's "
                "losses. Real ranks in a ring, which compress every partial sum.",
                (_arm(task, "raw"), *(_on_ring(task, scale) for scale in _SCALES)),
                partial(_by_scale, task=task),
            )
            for task in _TASKS
        ),
        *(
            Experiment(
                f"Speed-up at equal accuracy: {task}",
                f"Over the ring, gradients times {_SUM}. The paper trains INC+C for more epochs "
                "than WA until both have the same accuracy, and compares their times. Here: the "
                "time of WA's steps by that of so many steps of INC+C, from the first "
                f"{_STEPS} steps of either, on shaped links. A speed-up is the mean of those of "
                "pairs of runs. *In a ring*: what the ring alone saves; the values are those of "
                "32 bit.",
                (
                    *(_arm(task, "raw"), _on_ring(task, _SUM)),
                    *(_on_ring(task, _SUM, longer) for longer in _LONGER),
                    *(_timed(task, way, b) for way in ("WA", "INC") for b in _BANDWIDTHS),
                    *(_timed(task, "INC+C", b, _SUM) for b in _BANDWIDTHS),
                ),
                partial(_by_steps, task=task),
            )
            for task in _TASKS
        ),
        *(
            Experiment(
                f"Shares of the classes and error: {task}",
                "Of the gradients of an uncompressed training, at 40 steps: the share of the "
                "values that take 0, 8, 16 and 32 bits beside their 2-bit tag, and the squared "
                "error as a share of the squared norm. The bound is absolute, so the scale of the "
                "gradient decides; 32 is that of the sum of a batch's losses, whose mean is taken "
                "elsewhere.",
                (_OBSERVED[task], *(_OBSERVED_SCALES[task, scale] for scale in _SCALES[1:])),
                partial(_shares, task=task),
                {"classes": ("shares of the classes", _chart_of_shares)}
                if task == _TASKS[-1]
                else {},
            )
            for task in _TASKS
        ),
        Experiment(
            "Lossy compression in software",
            "The paper's section VI: SZ compresses well and takes so long that training gets "
            "slower, hence the card. SZ3 with the absolute bound 2^-10, on gradients times 32 of "
            "an uncompressed training, and the paper's codec in software: ratio, squared error "
            "as a share of the squared norm, a core's milliseconds for one gradient, and the "
            "modelled time of a step of WA with it, as a share of WA's: the measured step, less "
            "what the bits save of four pushes, plus one encoding and four decodings.",
            (
                *_OBSERVED_SOFTWARE.values(),
                *(_timed(task, "WA", b) for b, task in product(_BANDWIDTHS, _TASKS)),
            ),
            _software,
        ),
        Experiment(
            "Times: WA, WA+C, INC, INC+C",
            f"Seconds of a step, a mean of {_SEEDS} runs, and the share of WA's, on shaped "
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
