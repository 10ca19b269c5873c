"""Draws docs/results/rivals.md and its picture from the file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from gradwire_lab.evaluate.found import table, with_interval
from rivals.arithmetic import steps_to, total
from rivals.results import RESULTS
from rivals.ways import (
    COMPUTES,
    DDP,
    HIVEMIND,
    LINKS,
    NOT_RUN,
    POWER_SGD,
    RAW,
    TARGETS,
    TORCHFT,
    WAYS,
)
from rivals.words import ABOUT, HEAD, REFEREE, SETTINGS

PICTURE = RESULTS.parents[1] / "pictures" / "rivals.svg"
_MISSING = "-"
Lines = Sequence[Mapping[str, Any]]


class Measured:
    """What the file says of each way."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.ways = [name for name in WAYS if self.of("train", name)]

    def of(self, kind: str, way: str, **more: Any) -> list[Mapping[str, Any]]:
        wanted = {"kind": kind, "way": way, **more}.items()
        return [line for line in self.lines if wanted <= line.items()]

    def losses(self, way: str) -> list[float]:
        return [line["evaluations"][-1][2] for line in self.of("train", way)]

    def steps(self, way: str, target: float) -> float | None:
        """The mean of the seeds; None unless all reach the loss."""
        found = [steps_to(line["evaluations"], target) for line in self.of("train", way)]
        return fmean(map(float, found)) if found and None not in found else None  # type: ignore[arg-type]

    def of_step(self, way: str, link: str, what: str) -> float | None:
        """Seconds or bytes (`step_seconds`, `step_bytes`) of a step. Bytes are those of a whole run
        where there is one, as some codecs send more later."""
        whole = [line for line in self.lines if (line["kind"], line["way"]) == ("whole", way)]
        if what == "step_bytes" and whole:
            return float(whole[0]["sent_bytes"] / whole[0]["evaluations"][-1][0])
        here = self.of("link", way, bandwidth=link)
        return float(here[0][what]) if here else None

    def cost(self, way: str, link: str, what: str, target: float) -> float | None:
        """Seconds or bytes to a loss."""
        steps = self.steps(way, target)
        own, plain = (self.of_step(each, link, what) for each in (way, DDP))
        if steps is None or own is None or plain is None:
            return None
        return total(steps, own, plain, WAYS[way].plain_steps)

    def exchange(self, way: str, link: str) -> float | None:
        """Seconds of an exchange beyond the computation of its steps."""
        own = self.of_step(way, link, "step_seconds")
        alone = self.of_step(COMPUTES, LINKS[-1], "step_seconds")
        return None if own is None or alone is None else WAYS[way].period * (own - alone)

    def fastest(self, link: str, target: float, ours: bool) -> tuple[str, float] | None:
        times = {
            way: seconds
            for way in self.ways
            if WAYS[way].ours == ours
            and (seconds := self.cost(way, link, "step_seconds", target)) is not None
        }
        return min(times.items(), key=lambda each: each[1]) if times else None


def _number(value: float | None) -> str:
    return _MISSING if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _named(way: str) -> str:
    return f"**{way}**" if WAYS[way].ours else way


def _losses(found: Measured) -> str:
    rows = []
    for way in found.ways:
        sent = [found.cost(way, LINKS[1], "step_bytes", target) for target in TARGETS]
        rows.append([
            _named(way),
            with_interval(found.losses(way)),
            *(_number(found.steps(way, target)) for target in TARGETS),
            *(_number(None if each is None else each / 1e6) for each in sent),
        ])  # fmt: skip
    targets = [f"{target:g}" for target in TARGETS]
    heads = ("way", "final", *(f"steps to {t}" for t in targets), *(f"MB to {t}" for t in targets))
    return table(heads, rows)


def _times(found: Measured, link: str) -> str:
    rows = []
    for way in found.ways:
        if line := found.of("link", way, bandwidth=link):
            times = [found.cost(way, link, "step_seconds", target) for target in TARGETS]
            rows.append([
                _named(way), f"{1e3 * line[0]['step_seconds']:,.0f}", *map(_number, times)
            ])  # fmt: skip
    return table(("way", "step, ms", *(f"s to {target:g}" for target in TARGETS)), rows)


def _verdict(found: Measured, link: str) -> str:
    """Who is first, and by how much."""
    said = []
    for target in TARGETS:
        ours, theirs = (found.fastest(link, target, own) for own in (True, False))
        if ours is None or theirs is None:
            continue
        first, second = sorted((ours, theirs), key=lambda each: each[1])
        whose = "gradwire is first" if first == ours else "gradwire loses"
        said.append(
            f"- To {target:g} {whose}: {first[0]} takes {first[1]:.0f} s, the best of the\n"
            f"  {'others' if first == ours else 'ways of gradwire'}, {second[0]}, "
            f"{second[1]:.0f} s, {second[1] / first[1]:.2g} times as long."
        )
    return "\n".join(said)


def _exchanges(found: Measured) -> str:
    rows = []
    for way in found.ways:
        times = [found.exchange(way, link) for link in LINKS]
        sent = found.of_step(way, LINKS[1], "step_bytes")
        if sent is not None and None not in times:
            size = f"{WAYS[way].period * sent / 1e6:.2g}"
            rows.append([_named(way), size, *(f"{1e3 * (each or 0.0):,.0f}" for each in times)])
    computes = 1e3 * (found.of_step(COMPUTES, LINKS[-1], "step_seconds") or 0.0)
    said = f"Between exchanges a step takes {computes:.0f} ms ({COMPUTES}, 1000 Mbit/s)."
    return f"{said}\n\n{table(('way', 'MB', *(f'ms, {LINKS_IN_WORDS[b]}' for b in LINKS)), rows)}"


def _reasons(found: Measured) -> str:
    """What explains the rows, with the numbers that say so."""

    def beyond(way: str, link: str) -> float:
        return 1e3 * (found.exchange(way, link) or 0.0)

    def loss(way: str, step: int) -> float:
        (value,) = [e[2] for e in found.of("train", way)[0]["evaluations"] if e[0] == step]
        return float(value)

    needed = (DDP, COMPUTES, POWER_SGD, TORCHFT, HIVEMIND, RAW)
    if not all(found.of("train", way) and found.of("link", way) for way in needed):
        return ""
    slow, fast = LINKS[0], LINKS[-1]
    plain = beyond(DDP, fast)
    bytes_ms = 8e-6 * found.of("link", DDP, bandwidth=fast)[0]["step_bytes"]
    return f"""- **Trips, not bytes**, from 100 Mbit/s on: DDP's exchange takes {plain:.0f} ms at
  1000 Mbit/s, of which its bytes take {bytes_ms:.0f}. So bf16 gains nothing there, and *compress*
  gains less than its bytes say: it takes as long at 100 Mbit/s as at 1000.
- **PowerSGD** takes {beyond(POWER_SGD, fast) / plain:.1f} times as long as DDP there: it reduces
  what it leaves alone, then both factors, one after the other, and multiplies and orthogonalises
  between.
- **torchft** reduces the model tensor by tensor, between a quorum and a vote:
  {beyond(TORCHFT, fast) / 1e3:.1f} s where gradwire's `DiLoCo` takes {beyond(RAW, fast) / 1e3:.1f}.
  Their losses are the same ({loss(TORCHFT, 600):.3f} and {loss(RAW, 600):.3f} at the end).
- **hivemind** sends a quarter of the bytes, and at 10 Mbit/s its exchange takes
  {beyond(HIVEMIND, slow) / 1e3:.1f} s where gradwire's DiLoCo takes {beyond(RAW, slow) / 1e3:.1f}
  with `raw` and {beyond(COMPUTES, slow) / 1e3:.1f} with `small`, which needs too many steps.
  `LocalSteps` with `int8` is what compares; it was not run. hivemind's replicas end apart.
- **gradwire's codec loses in DiLoCo**: `small` ends at {loss(COMPUTES, 600):.2f}, `raw` at
  {loss(RAW, 600):.2f}. On the way its loss rises, from {loss(COMPUTES, 240):.2f} after 240 steps to
  {loss(COMPUTES, 510):.2f} after 510. From 100 Mbit/s on, `raw` is faster to any loss.
- **Local steps end worse than DDP** in so few steps, whoever does them; to a low loss only ways
  that exchange every step come.
"""


def _confirmed(found: Measured) -> str:
    rows = []
    for line in found.lines:
        if line["kind"] == "whole":
            way, link = line["way"], line["bandwidth"]
            steps, seconds, _ = line["evaluations"][-1]
            here, plain = (found.of("link", each, bandwidth=link)[0] for each in (way, DDP))
            parts = (here["step_seconds"], plain["step_seconds"], WAYS[way].plain_steps)
            numbers = f"{steps:g}", f"{seconds:.0f}", f"{total(steps, *parts):.0f}"
            sent = f"{line['sent_bytes'] / 1e6:.3g}", f"{steps * here['step_bytes'] / 1e6:.3g}"
            rows.append([_named(way), LINKS_IN_WORDS[link], *numbers, *sent])
    return table(("way", "link", "steps", "s", "computed", "MB", "computed"), rows)


LINKS_IN_WORDS = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1000 Mbit/s"}


def text(lines: Lines) -> str:
    found = Measured(lines)
    parts = [HEAD, "![seconds to a loss behind three links](../pictures/rivals.svg)", ""]
    parts += ["## Losses and bytes", "", _losses(found), ""]
    for link in LINKS:
        parts += [f"## Links of {LINKS_IN_WORDS[link]}", "", _times(found, link), ""]
        parts += [_verdict(found, link), ""]
    parts += [
        "## What an exchange takes",
        "",
        _exchanges(found),
        "",
        _reasons(found),
        "## Not run",
        "",
    ]
    parts += [
        f"- **{way}**: {why}.\n  It needs {needed}." for way, (why, needed) in NOT_RUN.items()
    ]
    if missing := [name for name in WAYS if name not in found.ways]:
        said = f"- Not yet, for want of time, about three minutes each: {'; '.join(missing)}."
        parts += [fill(said, 100, subsequent_indent="  ")]
    parts += [""]
    parts += [SETTINGS, ABOUT, "", _confirmed(found), "", REFEREE]
    builds = sorted({line["build"]["commit"] for line in lines})
    machine = lines[0]["machine"]
    parts += ["", f"Made at {', '.join(builds)} on {machine['cores']} cores of {machine['cpu']}."]
    return "\n".join(parts) + "\n"


def draw(found: Measured, path: Path) -> None:
    """Seconds to the first loss, a panel for each link."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "gradwire", "font.size": 9}
    figure, panels = pyplot.subplots(1, len(LINKS), figsize=(9.5, 4.2), layout="constrained")
    for link, axes in zip(LINKS, panels, strict=True):
        times = {w: found.cost(w, link, "step_seconds", TARGETS[0]) for w in found.ways}
        shown = sorted(((t, w) for w, t in times.items() if t is not None), reverse=True)
        colors = ["#0b7285" if WAYS[way].ours else "#adb5bd" for _, way in shown]
        names = [way for _, way in shown]
        bars = axes.barh(names, [seconds for seconds, _ in shown], color=colors, height=0.7)
        axes.bar_label(bars, [f"{seconds:,.0f}" for seconds, _ in shown], padding=3)
        axes.set_title(LINKS_IN_WORDS[link], loc="left", fontsize=10)
        axes.set_xlim(0, 1.2 * max((seconds for seconds, _ in shown), default=1.0))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    figure.supxlabel(f"seconds to a loss of {TARGETS[0]:g} (gradwire's in colour)", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def write(lines: Lines) -> None:
    RESULTS.with_suffix(".md").write_text(text(lines), encoding="utf-8")
    draw(Measured(lines), PICTURE)
