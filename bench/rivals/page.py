"""Draws docs/results/rivals.md and its picture from the file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gradwire_lab.evaluate.found import table, with_interval
from rivals.arithmetic import steps_to, total
from rivals.results import RESULTS
from rivals.ways import DDP, LINKS, NOT_RUN, TARGETS, WAYS
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

    def cost(self, way: str, link: str, what: str, target: float) -> float | None:
        """Seconds or bytes (`step_seconds`, `step_bytes`) to a loss."""
        steps = self.steps(way, target)
        here, plain = self.of("link", way, bandwidth=link), self.of("link", DDP, bandwidth=link)
        if steps is None or not here or not plain:
            return None
        return total(steps, here[0][what], plain[0][what], WAYS[way].plain_steps)

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


def _confirmed(found: Measured) -> str:
    rows = []
    for line in found.lines:
        if line["kind"] == "whole":
            way, link, until = line["way"], line["bandwidth"], line["until"]
            reached = steps_to(line["evaluations"], until)
            last = line["evaluations"][-1]
            here, plain = (found.of("link", w, bandwidth=link)[0] for w in (way, DDP))
            computed = total(
                last[0], here["step_seconds"], plain["step_seconds"], WAYS[way].plain_steps
            )
            assert reached is not None
            rows.append([
                _named(way), LINKS_IN_WORDS[link], f"{last[0]:g}", f"{last[1]:.0f}",
                f"{computed:.0f}",
            ])  # fmt: skip
    return table(("way", "link", "steps", "measured, s", "computed, s"), rows)


LINKS_IN_WORDS = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1000 Mbit/s"}


def text(lines: Lines) -> str:
    found = Measured(lines)
    parts = [HEAD, "![seconds to a loss behind three links](../pictures/rivals.svg)", ""]
    parts += ["## Losses and bytes", "", _losses(found), ""]
    for link in LINKS:
        parts += [f"## Links of {LINKS_IN_WORDS[link]}", "", _times(found, link), ""]
        parts += [_verdict(found, link), ""]
    parts += ["## Not run", ""]
    parts += [
        f"- **{way}**: {why}.\n  It needs {needed}." for way, (why, needed) in NOT_RUN.items()
    ]
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
