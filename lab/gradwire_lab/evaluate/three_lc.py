"""3LC's evaluation (Lim, Andersen, Kaminsky; SysML 2019), section 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from gradwire_lab.evaluate.arms import HOOK, TASKS, Arm, arm
from gradwire_lab.evaluate.charts import Line, Lines, line_through, lines_over_steps
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import Found, accuracy_table, table
from gradwire_lab.evaluate.store import curve
from gradwire_lab.train.settings import ONE_PROCESS

_Way = Callable[[Arm], Arm]
_S = ("1.00", "1.50", "1.75", "1.90")
_RATES = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
_TIMED_STEPS = {"10mbit": 12, "100mbit": 40, "1gbit": 40}
_TIMED_SEEDS = 2
_QUARTERS = (0.25, 0.5, 0.75, 1.0)
_SEEDS = 3
_LOWEST_DRAWN = 50  # percent; a lower line would press the others together

# Codec and changes of each design, the paper's accuracy, its difference, and the speed-ups.
_DESIGNS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "32-bit float": ("raw", {}, ("93.37", "", "1", "1", "1")),
    "8-bit int": ("int8", {}, ("93.33", "-0.04", "3.62", "3.47", "1.51")),
    "Stoch 3-value b-3-5": ("stoch3", {}, ("92.06", "-1.31", "12.3", "7.51", "1.53")),
    "MQE 1-bit int": ("onebit", {}, ("93.21", "-0.16", "14.6", "7.40", "1.30")),
    "5% sparsification": ("topk:ratio=0.05", {}, ("92.87", "-0.50", "8.98", "6.62", "1.44")),
    "2 local steps": ("raw", {"every": 2}, ("93.03", "-0.34", "1.92", "1.87", "1.38")),
    "3LC (s=1.00)": ("3lc:s=1.00,coder=rice", {}, ("93.32", "-0.05", "15.9", "7.97", "1.53")),
    "3LC (s=1.50)": ("3lc:s=1.50,coder=rice", {}, ("93.29", "-0.08", "20.9", "8.70", "1.53")),
    "3LC (s=1.75)": ("3lc:s=1.75,coder=rice", {}, ("93.51", "+0.14", "22.8", "9.04", "1.53")),
    "3LC (s=1.90)": ("3lc:s=1.90,coder=rice", {}, ("93.10", "-0.27", "22.8", "9.22", "1.55")),
}
_BASE = "32-bit float"
_SHOWN = (_BASE, "Stoch 3-value b-3-5", "5% sparsification", "2 local steps", "3LC (s=1.00)")
# Each has the same colour and marker in all figures. Those that share a colour share no figure.
_LOOKS = (
    *(_BASE, "8-bit int", "MQE 1-bit int", "5% sparsification", "2 local steps", "3LC (s=1.00)"),
    *("3LC (s=1.75)", "Stoch 3-value b-3-5", "", "3LC (s=1.50)", "3LC (s=1.90)"),
)
_ALL_S = tuple(f"3LC (s={s})" for s in _S)
_IN_FIGURE_6 = ("1.00", "1.75")
_NO_ZRE = "no ZRE"
_WITHOUT_ZRE = f"{_ALL_S[0]}, {_NO_ZRE}"
# Those that are timed.
_ON_LINKS = _DESIGNS | {_WITHOUT_ZRE: ("3lc:s=1.00,coder=none", {}, ("",) * 5)}
# Without error feedback, a worker's model drifts from the server's where changes are pulled. The
# full name of the usual exchange keeps its runs, which evaluate both models, apart from older ones,
# which evaluated the server's.
_DRIFTING = "Stoch 3-value b-3-5"
_BOTH_MODELS = {"exchange": f"{ONE_PROCESS}:pulls=updates"}
_GRADIENTS_PULLED = {
    "Stoch 3-value, gradients pulled": arm("resnet8", "stoch3", seeds=_SEEDS, exchange=HOOK),
}


def _train(design: str, seeds: int, **more: Any) -> Arm:
    codec, changes, _ = _DESIGNS[design]
    way = _BOTH_MODELS if design == _DRIFTING else {}
    return arm("resnet8", codec, seeds=seeds, **(more | changes | way))


def _full(design: str) -> Arm:
    return _train(design, _SEEDS)


def _shorter(design: str, share: float) -> Arm:
    """With a share of the standard steps, a whole number of exchanges."""
    return _full(design) if share == 1.0 else _train(design, 1, steps=_steps(share))


def _steps(share: float) -> int:
    return round(TASKS["resnet8"]["steps"] * share / 2) * 2


def _with_zre(s: str, **changes: Any) -> Arm:
    """With the paper's coder. The values don't depend on the coder."""
    coder = "coder=none" if s == _NO_ZRE else "coder=zre"
    sent = _S[0] if s == _NO_ZRE else s
    return arm("resnet8", f"3lc:s={sent},{coder}", **changes)


def _timed(design: str, bandwidth: str, exchange: str = "server") -> Arm:
    """On shaped links, with one server. With zero-run encoding, whose bytes change during a
    training, a tenth of the steps is timed, as in the paper, otherwise a few.

    The server exchanges in every step. So 2 local steps are timed by workers that step alone
    between two averages of `sharded`, which has no server.
    """
    codec, changes, _ = _ON_LINKS[design]
    steps = _steps(0.1) if design in _ALL_S else _TIMED_STEPS[bandwidth]
    return arm(
        "resnet8",
        codec.replace("coder=rice", "coder=zre"),
        timed=True,
        seeds=_TIMED_SEEDS,
        exchange="sharded" if changes else exchange,
        bandwidth=bandwidth,
        steps=steps,
        eval_every=steps,
        **changes,
    )


def _timed_base(design: str, bandwidth: str) -> Arm:
    """32-bit float in the same exchange."""
    return _timed(_BASE, bandwidth, "sharded" if _ON_LINKS[design][1] else "server")


_TIMED = tuple(_timed(design, bandwidth) for bandwidth in _RATES for design in _ON_LINKS) + tuple(
    _timed_base("2 local steps", bandwidth) for bandwidth in _RATES
)


def _wider(one: Arm, **changes: Any) -> Arm:
    """The timed run of ResNet-20 at full width with 4 workers, of few steps."""
    steps = _TIMED_STEPS[dict(one.changes)["bandwidth"]]
    more = {"model": "resnet20", "workers": 4, "steps": steps, "eval_every": steps}
    return replace(one, changes=tuple((dict(one.changes) | more | changes).items()))


def _tensorwise(one: Arm) -> Arm:
    """With fine-grained barriers, if it has a server."""
    has_server = dict(one.changes)["exchange"] == "server"
    return _wider(one, barrier="tensor") if has_server else _wider(one)


_STEPWISE = {f"{design}, a barrier a step": (design, _wider) for design in (_BASE, _ALL_S[0])}
_FINE = (
    *map(_tensorwise, _TIMED),
    *(_wider(_timed(one, bandwidth)) for bandwidth in _RATES for one, _ in _STEPWISE.values()),
)


def _table_1(found: Found) -> str:
    arms = {design: _full(design) for design in _DESIGNS} | _GRADIENTS_PULLED
    theirs = {design: numbers[:2] for design, (_, _, numbers) in _DESIGNS.items()}
    heads = ("server's model", "paper: accuracy (%)", "paper: difference")
    cells = {d: (found.served(one), *theirs.get(d, ("", ""))) for d, one in arms.items()}
    return accuracy_table(found, arms, heads, cells)


def _beside_table_1(found: Found, arms: Mapping[str, Arm]) -> str:
    base, usual = arms[_BASE], _full(_BASE)
    cells = {d: [found.change(one, base, _full(d), usual)] for d, one in arms.items()}
    return accuracy_table(found, arms, ["change"], cells)


def _speed_ups(
    found: Found, way: _Way = lambda one: one, more: Mapping[str, tuple[str, _Way]] | None = None
) -> str:
    """way: of all designs, and of what they are compared with. more: rows of designs in other
    ways."""
    shown = {design: (design, way) for design in _ON_LINKS} | dict(more or {})
    heads, rows = ["design"], {label: [label] for label in shown}
    for place, bandwidth in enumerate(_RATES):
        heads += [bandwidth, "paper"]
        for label, (design, own_way) in shown.items():
            base = way(_timed_base(design, bandwidth))
            own = own_way(_timed(design, bandwidth))
            theirs = _ON_LINKS[design][2][2 + place] if label == design else ""
            rows[label] += [found.speed_up(own, base), theirs]
    return table(heads, rows.values())


def _table_2(found: Found) -> str:
    heads = (
        *("s", "ratio, end to end", "of compressed tensors", "bits pushed, pulled"),
        *("paper: ratio", "paper: bits", "with coder=rice: bits"),
    )
    rows = []
    for s, theirs in _TABLE_2.items():
        own = [(s, _with_zre(s, steps=_steps(0.25)), _with_rice(s))]
        if s in _IN_FIGURE_6:
            own.append((f"{s}, all steps", _with_zre(s), _with_rice(s, 1.0)))
        for label, one, rice in own:
            ratios = found.ratio_of_all(one), found.ratio(one)
            rows.append([label, *ratios, found.bits(one), *theirs, found.bits(rice)])
    return table(heads, rows)


# Two causes that may make large multipliers lose more here: fewer steps, and smaller tensors.
_LONG = {d: _train(d, _SEEDS, steps=25600) for d in (_BASE, *_ALL_S)}
_WIDE = {d: _train(d, _SEEDS, width=16) for d in (_BASE, *_ALL_S[::2], _ALL_S[-1])}


_TABLE_2 = {
    _NO_ZRE: ("20.0x", "1.60"),
    "1.00": ("39.4x", "0.812"),
    "1.50": ("70.9x", "0.451"),
    "1.75": ("107x", "0.298"),
    "1.90": ("160x", "0.200"),
}


def _with_rice(s: str, share: float = 0.25) -> Arm:
    """What a row of table 2 is compared with."""
    return _shorter(f"3LC (s={_S[0] if s == _NO_ZRE else s})", share)


def _gaps(found: Found) -> str:
    """By the share of the steps, to 32-bit float with as many."""
    rows = (
        [
            design,
            *(found.difference(_shorter(design, s), _shorter(_BASE, s)) for s in _QUARTERS),
        ]
        for design in _ALL_S
    )
    return table(("to 32-bit float", *(f"{100 * share:.0f} %" for share in _QUARTERS)), rows)


def _of_time(found: Found, designs: tuple[str, ...], bandwidth: str) -> Lines:
    """Accuracy over the time that the steps take, for each share of the steps."""
    drawn = {}
    for design in designs:
        seconds = found.seconds_a_step(_timed(design, bandwidth))
        arms = [_shorter(design, share) for share in _QUARTERS]
        ends = [(found.settings[one].steps, found.ends(one)) for one in arms if found.ends(one)]
        if seconds is not None and ends and min(min(y) for _, y in ends) > _LOWEST_DRAWN:
            drawn[design] = line_through([(steps * seconds / 60, y) for steps, y in ends])
    return Lines(
        drawn, f"training time at {_RATES[bandwidth]} (minutes)", "test accuracy (%)",
        logarithmic=True, markers=True, looks=_LOOKS,
    )  # fmt: skip


def _over_steps(found: Found, of_loss: bool) -> Lines:
    arms = {design: _full(design) for design in _SHOWN}
    return lines_over_steps(found, arms, of_loss=of_loss, looks=_LOOKS)


def _bits_over_steps(found: Found, s: str) -> Lines:
    drawn: dict[str, Line] = {}
    share, one = _compressed_share(found), _with_zre(s)
    for run in found.runs(one)[:1] if share else []:
        for leg in ("push", "pull"):
            everything, mean = getattr(run, f"{leg}_bits"), getattr(run, f"{leg}_payload_bits")
            steps, bits = curve(everything, found.settings[one].steps)
            above = fmean(bits)  # the rest, raw tensors and headers, is the same in each step
            drawn[leg] = Line(steps, [mean + (of_step - above) / share for of_step in bits])
    return Lines(drawn, "step", "bits of a compressed value", title=f"s={s}")


def _compressed_share(found: Found) -> float:
    """The share of values that are in compressed tensors. What else is sent is as much with each s,
    so two runs tell it. 0: they are not there."""
    runs = [run for s in _IN_FIGURE_6 for run in found.runs(_with_zre(s))[:1]]
    sent = [(run.push_bits_per_value, run.push_payload_bits) for run in runs]
    counted = [
        (of_all, of_compressed) for of_all, of_compressed in sent if of_all and of_compressed
    ]
    if len(counted) < len(_IN_FIGURE_6):
        return 0.0
    of_all, of_compressed = (first - second for first, second in zip(*counted, strict=True))
    return of_all / of_compressed


_OF_TIME = (
    ("figure-3", "the designs", tuple(d for d in _DESIGNS if d not in _ALL_S[1::2])),
    ("figure-5", "with each sparsity multiplier", (_BASE, *_ALL_S)),
)

EVALUATION = Evaluation(
    "3lc",
    "3LC: its evaluation, here",
    "Lim, Andersen, Kaminsky: 3LC (SysML 2019), section 4. The paper trains ResNet-110 on CIFAR-10 "
    "with 10 workers x 32 images, 25,600 steps, 5 runs. The recipe here is the paper's: SGD with "
    "momentum 0.9, weight decay 1e-4, cosine, statistics of batch normalisation from one worker. "
    "Batch normalisation goes raw, as in the paper; here biases and tensors of fewer than 256 "
    "values do, too. One process simulates the workers and their server, which compresses the "
    "change of its model. Accuracy is that of the server's model, as in the paper, and in runs of "
    "commits from 4472b71 on that of worker 0's, which lacks what pulls still owe: in table 1 the "
    "seeds of which the column of the server's model tells the difference.",
    (
        Experiment(
            "Table 1: accuracy",
            "With all steps. 3LC's values do not depend on its coder, which is `rice` here; so "
            "without ZRE it ends as with it. The design with stochastic 3-value quantization keeps "
            "no residual, so what it changes in pulls is never made good: the server's model, "
            "which nobody trains with, drifts from the workers'. *Server's model*: the "
            "accuracy of that model, with the statistics of batch normalisation of worker 0, in "
            "the runs that have both, and in brackets its difference to worker 0's. The last row "
            "pulls the average gradient instead, as TernGrad.",
            (*map(_full, _DESIGNS), *_GRADIENTS_PULLED.values()),
            _table_1,
        ),
        Experiment(
            "Table 1: speed-up",
            "Time of a step, against 32-bit float on the same links: real processes in network "
            "namespaces, one server. As in the paper, designs with zero-run encoding are timed in "
            "a tenth of the steps, with the whole schedule of the learning rate, because their "
            "bytes change during a training; the others in a few steps. A speed-up is the "
            "mean of those of two pairs of runs. 2 local steps run without a server, and so does "
            "the 32-bit float with which they are compared.",
            _TIMED,
            _speed_ups,
        ),
        Experiment(
            "Table 1: speed-up with fine-grained barriers",
            "The same of ResNet-20 (269,434 values) with 4 workers, in the first steps of a "
            "training: each tensor is pushed and pulled by itself, as in the paper's system, also "
            "without compression. Five processes share the machine's cores; where these are fewer, "
            "computing takes a larger part of a step than in the paper, whose workers have a GPU "
            "each.",
            _FINE,
            partial(_speed_ups, way=_tensorwise, more=_STEPWISE),
        ),
        Experiment(
            "Larger multipliers: more steps",
            "The paper's number of steps, 3.8 times those of table 1. *Change*: of the difference, "
            "from that in table 1's steps.",
            tuple(_LONG.values()),
            partial(_beside_table_1, arms=_LONG),
        ),
        Experiment(
            "Larger multipliers: a wider model",
            "Twice as many channels, so four times as many values in most tensors, and the steps "
            "of table 1. Narrow, tensors have 72 to 9,216 values, here 144 to 36,864. "
            "*Change*: of the difference, from that of the narrow model.",
            tuple(_WIDE.values()),
            partial(_beside_table_1, arms=_WIDE),
        ),
        Experiment(
            "Table 2: bits of a value",
            "Over a training of a quarter of the steps, and for two s over all steps, as in the "
            "paper. Bits are of the compressed tensors alone. End to end, as the paper's ratios "
            "are, everything counts: headers, and the tensors that go raw, which are a larger part "
            "of this model than of ResNet-110.",
            (
                *(_with_zre(s, steps=_steps(0.25)) for s in _TABLE_2),
                *map(_with_zre, _IN_FIGURE_6),
                *map(_with_rice, _S),
            ),
            _table_2,
        ),
        Experiment(
            "Figures 3 and 5: 25, 50, 75 and 100 % of the steps",
            "Each point is a training of its own, in one process, with its own schedule of the "
            "learning rate; its time is the number of its steps times that of a step in table 1's "
            "speed-ups. Points of 25, 50 and 75 % have one seed, those of 100 % up to three, and "
            f"the spread. A design that ends below {_LOWEST_DRAWN} % is left out. 2 local steps "
            "run without a server, in whose exchange uncompressed steps, too, take another time. "
            "The table has differences of accuracy in points.",
            (*(_shorter(design, share) for share in _QUARTERS for design in _DESIGNS), *_TIMED),
            _gaps,
            figures={
                f"{figure}{end}": (
                    f"accuracy over training time at {_RATES[bandwidth]}, {what}",
                    partial(_of_time, designs=designs, bandwidth=bandwidth),
                )
                for figure, what, designs in _OF_TIME
                for bandwidth, end in (("10mbit", ""), ("100mbit", "-100mbit"), ("1gbit", "-1gbit"))
            },
        ),
        Experiment(
            "Figure 4: during a training",
            "The mean of the seeds, and their spread. Between two evaluations of a seed its "
            "accuracy is interpolated, where another seed has its own.",
            tuple(map(_full, _SHOWN)),
            figures={
                "figure-4-loss": ("training loss over steps", partial(_over_steps, of_loss=True)),
                "figure-4-accuracy": (
                    "test accuracy over steps",
                    partial(_over_steps, of_loss=False),
                ),
            },
        ),
        Experiment(
            "Figure 6: bits over steps",
            "Of the compressed tensors, with zero-run encoding; seed 0. In the paper pushes are "
            "the smaller ones until the last third of the training.",
            tuple(map(_with_zre, _IN_FIGURE_6)),
            figures={
                f"figure-6-s{s}": (
                    f"bits of a value, pushed and pulled, over steps, s={s}",
                    partial(_bits_over_steps, s=s),
                )
                for s in _IN_FIGURE_6
            },
        ),
    ),
)
