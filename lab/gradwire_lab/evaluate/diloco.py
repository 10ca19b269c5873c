"""DiLoCo and its family (Douillard et al. 2023, arXiv:2311.08105): loss against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from gradwire.local_schedule import Schedule
from gradwire_lab.evaluate.arms import Arm, arm
from gradwire_lab.evaluate.charts import Line, Lines, line_through
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import DIVERGED, MISSING, Found, signed, table

_SEEDS = 3
_STEPS = 600
_BATCH = 32  # sequences of all workers in a step
_WORKERS = (4, 8)
_EVERY = (15, 30, 100)
_USUAL = 30
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
# Learning rates that were tried with `every` 30 and 32 bits, and with DDP. The tables have those of
# _USED.
_TRIED = {"adamw": (7.5e-4, 1.5e-3, 3e-3), "muon": (6e-3, 1.2e-2, 2.4e-2)}
_USED = {("adamw", True): 3e-3, ("adamw", False): 1.5e-3, ("muon", True): 1.2e-2}
_USED |= {("muon", False): 1.2e-2}
_DDP_WAY = "DDP"
_RAW = "32 bits"
_SPARSE = "2 %, 2 bits"
_CODECS = {
    _RAW: "raw",
    "8 bits": "int8",
    "4 bits": "qsgd:bits=4,ef=on",
    "half, 2 bits": "topk2bit:density=0.5",
    _SPARSE: "topk2bit:density=0.02/raw",
    "3LC": "3lc:s=1.00,coder=rice",
}
_STREAMED = (_RAW, "4 bits", "3LC")
# That send few values, or coarse ones. Only TernGrad keeps no residual.
_COARSE = {
    _RAW: "raw",
    "3LC": _CODECS["3LC"],
    "2 % in 2 bits": "topk2bit:density=0.02",
    "5 %": "topk:ratio=0.05",
    "1 bit": "onebit",
    "TernGrad": "terngrad",
}
_OUTER = {"nesterov": "Nesterov, momentum 0.9", "sgd": "SGD, no momentum"}
_STREAMING: dict[str, Any] = {"fragments": 3, "delay": 5, "mix": 0.5}


def _arm(
    codec: str,
    optimizer: str = "adamw",
    *,
    every: int = _USUAL,
    workers: int = _WORKERS[0],
    rate: float | None = None,
    outer: str = "nesterov",
    seeds: int = _SEEDS,
    **changes: Any,
) -> Arm:
    """With an outer optimizer, which is SparseLoCo's where few values are sent; or with DDP."""
    if codec == "ddp":
        way: dict[str, Any] = {}
    elif codec == _CODECS[_SPARSE]:
        way = {"every": every, "outer": "sgd", "residual_decay": 0.95}
    else:
        way = {"every": every, **({"outer": outer} if outer else {})}
    return arm(
        "gpt",
        codec,
        seeds=seeds,
        optimizer=optimizer,
        learning_rate=rate or _USED[optimizer, codec == "ddp"],
        workers=workers,
        batch=_BATCH // workers,
        steps=_STEPS,
        eval_every=_STEPS,
        **way,
        **changes,
    )


_DDP = {(o, workers): _arm("ddp", o, workers=workers) for o in _OPTIMIZERS for workers in _WORKERS}
_ADAMW = {(name, n): _arm(codec, every=n) for name, codec in _CODECS.items() for n in _EVERY}
_MUON = {
    (name, n): _arm(codec, "muon", every=n)
    for name, codec in _CODECS.items()
    for n in (_EVERY if name == _RAW else (_USUAL,))
}
_EIGHT = {name: _arm(codec, workers=_WORKERS[1]) for name, codec in _CODECS.items()}
_STREAM = {name: _arm(_CODECS[name], **_STREAMING) for name in _STREAMED}
_MOMENTUM = {
    (name, outer): _arm(codec, outer=outer, seeds=2)
    for name, codec in _COARSE.items()
    for outer in _OUTER
}
_MOMENTUM |= {(name, "nesterov"): _ADAMW[name, _USUAL] for name in (_RAW, "3LC")}
# Without an outer optimizer.
_PLAIN_EVERY = (2, 4, 10, 30)
_PLAIN = {
    (name, n): _arm(_CODECS[name], every=n, outer="", seeds=1)
    for name in _STREAMED
    for n in _PLAIN_EVERY
}
# 32 bits with and without the gain for noise, of which one is what LocalSteps does by itself.
_GAIN = {
    (gain, n): _PLAIN[_RAW, n]
    if Schedule(every=n).is_seldom == (gain == "off")
    else _arm("raw", every=n, outer="", seeds=1, correct_noise=gain)
    for gain in ("on", "off")
    for n in _PLAIN_EVERY
}
_TUNING = {
    (optimizer, way): {rate: _arm(codec, optimizer, rate=rate, seeds=1) for rate in rates}
    for optimizer, rates in _TRIED.items()
    for way, codec in ((_DDP_WAY, "ddp"), ("DiLoCo", "raw"))
}


def _loss(found: Found, one: Arm, base: Arm) -> str:
    """The loss, and its ratio to DDP's with the same seeds."""
    ends, theirs = found.pairs(one, base)
    ratio = f", {fmean(ends) / fmean(theirs):.3f}" if ends and one != base else ""
    return found.text(one) + ratio


def megabytes(found: Found, one: Arm) -> float | None:
    """What a worker sends in a whole training run, and receives as well; the mean of the seeds.

    The runs count the bytes of one-process exchanges. DDP's has a server; its ring sends
    (N - 1) / N of that. Workers that code only what they push send it to each other (the exchange
    broadcast), where their runs count without what a worker keeps, (N - 1) / N of it."""
    runs, workers = found.runs(one), found.settings[one].workers
    if not runs:
        return None
    pushed = fmean(run.push_bytes or 0 for run in runs) / 1e6
    if one.codec.endswith("/raw"):
        return workers * pushed
    both = pushed + fmean(run.pull_bytes or 0 for run in runs) / 1e6
    return both * (workers - 1) / workers if one.codec == "ddp" else both


def size(found: Found, one: Arm) -> str:
    """The megabytes as a table has them."""
    sent = megabytes(found, one)
    if sent is None:
        return MISSING
    return f"{sent:,.0f}" if sent >= 1000 else f"{sent:.3g}"


def _by_interval(found: Found) -> str:
    base = _DDP["adamw", _WORKERS[0]]
    rows = [["DDP", "", size(found, base), _loss(found, base, base), "", ""]]
    for name, codec in _CODECS.items():
        arms = [_ADAMW[name, n] for n in _EVERY]
        sizes = ", ".join(size(found, one) for one in arms)
        rows.append([name, f"`{codec}`", sizes, *(_loss(found, one, base) for one in arms)])
    losses = table(("what is sent", "codec", "MB", *(f"every={n}" for n in _EVERY)), rows)
    return f"{losses}\n\n{_to_32_bits(found)}"


def _to_32_bits(found: Found) -> str:
    rows = [
        [name, *(found.difference(_ADAMW[name, n], _ADAMW[_RAW, n]) or MISSING for n in _EVERY)]
        for name in _CODECS
        if name != _RAW
    ]
    return table(("to 32 bits", *(f"to 32 bits, every={n}" for n in _EVERY)), rows)


def _by_optimizer(found: Found) -> str:
    by_optimizer = {"adamw": _ADAMW, "muon": _MUON}
    heads, rows = ["what is sent", "MB"], [["DDP", size(found, _DDP["adamw", _WORKERS[0]])]]
    rows += [[f"{name}, every={n}", size(found, one)] for (name, n), one in _MUON.items()]
    for optimizer, title in _OPTIMIZERS.items():
        base, arms = _DDP[optimizer, _WORKERS[0]], by_optimizer[optimizer]
        heads += [title, f"{title}: change"]
        rows[0] += [_loss(found, base, base), ""]
        for place, row in zip(_MUON, rows[1:], strict=True):
            one = arms[place]
            row += [_loss(found, one, base), found.difference(one, arms[_RAW, _USUAL])]
    return table(heads, rows)


def _beside_usual(found: Found, arms: dict[str, Arm], base: Arm, head: str) -> str:
    usual = _DDP["adamw", _WORKERS[0]]
    rows = []
    for name, one in arms.items():
        before = _ADAMW[name, _USUAL]
        change = _change(found.ratios(one, base), found.ratios(before, usual))
        rows.append([name, _loss(found, before, usual), _loss(found, one, base), change])
    if base != usual:
        rows.insert(0, ["DDP", _loss(found, usual, usual), _loss(found, base, base), ""])
    usual_head = f"every={_USUAL}, four workers"
    return table(("what is sent", usual_head, head, "change of the ratio"), rows)


def _change(ratios: Mapping[int, float], before: Mapping[int, float]) -> str:
    """The mean over equal seeds, with its interval."""
    changes = [ratios[seed] - before[seed] for seed in ratios if seed in before]
    return signed(changes, 3) if changes else MISSING


def _by_momentum(found: Found) -> str:
    base = _DDP["adamw", _WORKERS[0]]
    rows = [
        [name, f"`{codec}`", *(_loss(found, _MOMENTUM[name, outer], base) for outer in _OUTER)]
        for name, codec in _COARSE.items()
    ]
    return table(("what is sent", "codec", *_OUTER.values()), rows)


def _by_plain_interval(found: Found) -> str:
    base = _DDP["adamw", _WORKERS[0]]
    arms = {(f"32 bits, gain {gain}", n): one for (gain, n), one in _GAIN.items()}
    arms |= {(name, n): one for (name, n), one in _PLAIN.items() if name != _RAW}
    rows = [
        [name, *(_loss(found, arms[name, n], base) for n in _PLAIN_EVERY)]
        for name in dict.fromkeys(name for name, _ in arms)
    ]
    return table(("what is sent", *(f"every={n}" for n in _PLAIN_EVERY)), rows)


def _rates(found: Found) -> str:
    rows = [
        [
            f"{way}, {_OPTIMIZERS[o]}",
            f"{_USED[o, way == _DDP_WAY]:g}",
            ", ".join(f"{rate:g}: {_of_seed_0(found, one)}" for rate, one in arms.items()),
        ]
        for (o, way), arms in _TUNING.items()
    ]
    return table(("way", "in the other tables", "learning rate: held-out loss"), rows)


def _of_seed_0(found: Found, one: Arm) -> str:
    run = found.results.get(one, {}).get(0)
    if run is None:
        return MISSING
    return DIVERGED if run.final is None else found.metric(one).text(run.final)


def _line(found: Found, arms: Sequence[Arm]) -> Line:
    sizes = {one: megabytes(found, one) for one in arms}
    points = [(mb, found.ends(one)) for one, mb in sizes.items() if mb and found.ends(one)]
    return line_through(sorted(points)) if points else Line([], [])


def _picture(found: Found) -> Lines:
    lines = {"DDP": [_DDP["adamw", _WORKERS[0]]]}
    lines |= {name: [_ADAMW[name, n] for n in _EVERY] for name in _CODECS}
    lines["DDP, Muon"] = [_DDP["muon", _WORKERS[0]]]
    lines |= {"32 bits, Muon": [_MUON[_RAW, n] for n in _EVERY]}
    fewer = [name for name in _CODECS if name != "3LC"]
    lines |= {"32 to 2 bits, Muon, every=30": [_MUON[name, _USUAL] for name in fewer]}
    drawn = {name: _line(found, arms) for name, arms in lines.items()}
    return Lines(
        {name: line for name, line in drawn.items() if line.xs},
        "MB a worker sends in the training run",
        "held-out loss (nats a byte)",
        logarithmic=True,
        markers=True,
        looks=tuple(lines),
    )


EVALUATION = Evaluation(
    "diloco",
    "DiLoCo and its family: loss against bytes",
    "Workers step their own models and exchange the change of `every` steps (`LocalSteps`): "
    "DiLoCo (Douillard et al., arXiv:2311.08105), Streaming DiLoCo (arXiv:2501.18512), "
    "SparseLoCo (arXiv:2508.15706) and MuLoCo (arXiv:2505.23725). The outer optimizer is "
    f"DiLoCo's, Nesterov with momentum 0.9 and rate 0.7. `{_CODECS[_SPARSE]}` goes with "
    "SparseLoCo's, the plain average and residuals that decay by 0.95; its workers send to "
    "each other what they push, and nothing is coded twice. Muon steps the matrices inside "
    "the blocks, AdamW the rest. All codecs but 32 bits and TernGrad keep residuals. A cell has "
    "the mean of the seeds with its 95 % interval (Student's t), and its ratio to DDP's mean "
    "over the same seeds. MB are what a worker sends in the whole training run, and receives as "
    "well.",
    (
        Experiment(
            "Steps between exchanges",
            "AdamW, four workers. MB belong to the intervals in their order. The second table has "
            "differences at equal seeds.",
            (_DDP["adamw", _WORKERS[0]], *_ADAMW.values()),
            _by_interval,
            {"bytes": ("held-out loss over megabytes, each codec at three intervals", _picture)},
        ),
        Experiment(
            "Muon",
            "The same with Muon (MuLoCo), at equal bytes. *Change*: to 32 bits and "
            f"every={_USUAL}, at equal seeds.",
            (*(_DDP[o, _WORKERS[0]] for o in _OPTIMIZERS), *_MUON.values()),
            _by_optimizer,
        ),
        Experiment(
            "Streaming",
            f"Every {_USUAL} steps, in {_STREAMING['fragments']} fragments that take turns; an "
            f"exchange takes {_STREAMING['delay']} steps, and a worker keeps half of its own "
            "values. AdamW, four workers.",
            tuple(_STREAM.values()),
            partial(_beside_usual, arms=_STREAM, base=_DDP["adamw", _WORKERS[0]], head="streaming"),
        ),
        Experiment(
            "Plain average",
            "`LocalSteps` without an outer optimizer. Its gain for noise (`correct_noise`) is on "
            "by default up to every=4, also in the last two rows. AdamW, four workers.",
            tuple(dict.fromkeys((*_PLAIN.values(), *_GAIN.values()))),
            _by_plain_interval,
        ),
        Experiment(
            "Outer momentum",
            "Codecs that send few values or coarse ones, with an outer optimizer that has momentum "
            f"and one that has none (rate 1). Every {_USUAL} steps, AdamW, four workers.",
            tuple(_MOMENTUM.values()),
            _by_momentum,
        ),
        Experiment(
            "Eight workers",
            f"As many sequences in a step as with four. Every {_USUAL} steps, AdamW.",
            (_DDP["adamw", _WORKERS[1]], *_EIGHT.values()),
            partial(
                _beside_usual, arms=_EIGHT, base=_DDP["adamw", _WORKERS[1]], head="eight workers"
            ),
        ),
        Experiment(
            "Learning rates",
            f"Seed 0 with each rate that was tried (every={_USUAL}, 32 bits).",
            tuple(one for arms in _TUNING.values() for one in arms.values()),
            _rates,
        ),
    ),
)
