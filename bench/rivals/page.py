"""Draws docs/results/rivals.md and its picture from the file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from gradwire_lab.evaluate.found import table, with_interval
from rivals.arithmetic import steps_to, total
from rivals.results import RESULTS, best, next_rate, rates
from rivals.ways import (
    BF16,
    CHANGES,
    DDP,
    EIGHT_BITS,
    HIVEMIND,
    HOOK,
    LATENCY,
    LINKS,
    NOT_RUN,
    POWER_SGD,
    RAW,
    SMALL,
    STEPS,
    TARGETS,
    TORCHFT,
    TORCHFT_BUCKETS,
    WAYS,
    WORKERS,
)
from rivals.words import ABOUT, HEAD, RATES, REFEREE, SETTINGS

_ROOT = RESULTS.parents[2]
PICTURE = RESULTS.parents[1] / "pictures" / "rivals.svg"
# Pages that quote the results, and what they call the ways.
QUOTES: Mapping[Path, Mapping[str, str]] = {
    _ROOT / "README.md": {
        DDP: "plain DDP",
        BF16: "DDP, PyTorch's bf16 hook",
        CHANGES: "above",
        "compress, small, every=2": "above, `every=2`",
    },
    _ROOT / "docs" / "guides" / "far_apart.md": {
        DDP: "DDP",
        BF16: "DDP, PyTorch's bf16 hook",
        CHANGES: '`compress`, `"small"`',
        "compress, small, every=2": '`compress`, `"small"`, `every=2`',
        RAW: 'DiLoCo, `"raw"`, `every=30`',
        "DiLoCo, half-byte": 'DiLoCo, `"half-byte"`, `every=30`',
        "streaming, half-byte": 'streaming DiLoCo, `"half-byte"`, `every=30`',
    },
}
_MISSING = "-"
ONE_WAY_MS = round(1e3 * LATENCY)
RINGS_MS = 2 * 2 * (WORKERS - 1) * ONE_WAY_MS  # two buckets, each twice around but for a step
Lines = Sequence[Mapping[str, Any]]


class Measured:
    """What the file says of each way, with its best learning rate.

    tried: the last losses of each way's learning rates.
    """

    def __init__(self, lines: Lines) -> None:
        self.tried = {name: found for name in WAYS if (found := rates(lines, name))}
        self.ways = list(self.tried)
        self.lines = [
            line
            for line in lines
            if line["kind"] != "train" or line["rate"] == best(self.tried[line["way"]])
        ]

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
        """What a line of links says of a step. Bytes are those of a whole run where there is one:
        some codecs send more later."""
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

    def sent(self, way: str) -> float:
        """Bytes of all steps of a training."""
        own, plain = (self.of_step(each, LINKS[1], "step_bytes") or 0.0 for each in (way, DDP))
        return total(STEPS, own, plain, WAYS[way].plain_steps)

    def exchange(self, way: str, link: str) -> float | None:
        """Seconds of an exchange beyond the computation of its steps."""
        own = self.of_step(way, link, "step_seconds")
        return None if own is None or self.alone is None else WAYS[way].period * (own - self.alone)

    @property
    def alone(self) -> float | None:
        """Seconds of a step that exchanges nothing."""
        return self.of_step(RAW, LINKS[-1], "alone_seconds")

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
            _number(found.sent(way) / 1e6),
        ])  # fmt: skip
    first, second = (f"to {target:g}" for target in TARGETS)
    heads = [f"{unit} {to}" for unit in ("steps", "MB") for to in (first, second)] + ["all MB"]
    seeds = [len(found.losses(way)) for way in found.ways]
    text = f"Seeds of each way: {' to '.join(map(str, sorted({min(seeds), max(seeds)})))}."
    return table(("way", "final", *heads), rows) + f"\n\n{text}"


def _rates(found: Measured) -> str:
    columns = sorted({rate for tried in found.tried.values() for rate in tried})
    rows = []
    for way, tried in found.tried.items():
        losses = {rate: f"{loss:.2f}" for rate, loss in tried.items()}
        losses[best(tried)] = f"**{losses[best(tried)]}**"
        rows.append([_named(way), *(losses.get(rate, "") for rate in columns)])
    return table(("way", *(f"{1e3 * rate:g}" for rate in columns)), rows)


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
    timed = [way for way in found.ways if found.of("link", way)]
    if untimed := [way for way in timed if not found.of("link", way, bandwidth=link)]:
        said.append(_bullet(f"Not timed here, and perhaps better: {'; '.join(untimed)}."))
    return "\n".join(said)


def _exchanges(found: Measured) -> str:
    rows = []
    for way in found.ways:
        times = [found.exchange(way, link) for link in LINKS]
        sent = found.of_step(way, LINKS[1], "step_bytes")
        if sent is not None and None not in times:
            size = f"{WAYS[way].period * sent / 1e6:.2g}"
            rows.append(
                [_named(way), size, *(f"{1e3 * max(each or 0.0, 0.0):,.0f}" for each in times)]
            )
    alone = 1e3 * (found.alone or 0.0)
    said = _filled(
        f"A step without an exchange takes {alone:.0f} ms ({RAW}, 1000 Mbit/s). An exchange is "
        "what its steps take beyond that. Streaming's run beside the steps."
    )
    return f"{said}\n\n{table(('way', 'MB', *(f'ms, {LINKS_IN_WORDS[b]}' for b in LINKS)), rows)}"


def _reasons(found: Measured) -> str:
    """What explains the rows, with the numbers that say so."""

    def beyond(way: str, link: str) -> float:
        return 1e3 * (found.exchange(way, link) or 0.0)

    def loss(way: str, step: int) -> float:
        (value,) = [e[2] for e in found.of("train", way)[0]["evaluations"] if e[0] == step]
        return float(value)

    needed = (
        DDP, SMALL, POWER_SGD, TORCHFT, TORCHFT_BUCKETS, HIVEMIND, RAW, EIGHT_BITS, CHANGES, HOOK
    )  # fmt: skip
    if not all(found.of("train", way) and found.of("link", way) for way in needed):
        return ""
    slow, fast = LINKS[0], LINKS[-1]
    plain = beyond(DDP, fast)
    bytes_ms = 8e-6 * found.of("link", DDP, bandwidth=fast)[0]["step_bytes"]
    said = f"""- **Trips, not bytes**, at 1000 Mbit/s: DDP's exchange takes {plain:.0f} ms there, of
  which its bytes take {bytes_ms:.0f}. Rings of all workers, one for each of its two buckets, would
  take {RINGS_MS}. *compress* makes two trips, {2 * ONE_WAY_MS} ms of its
  {beyond(CHANGES, fast):.0f}; the hook makes two for each bucket, of which the first runs
  beside the bucket before it ([devices](devices.md)): {beyond(HOOK, fast):.0f}.
- **PowerSGD** takes {beyond(POWER_SGD, fast) / plain:.1f} times as long as DDP there: it reduces
  what it leaves alone, then both factors, one after the other. By the trips above that takes
  {3 * RINGS_MS // 2} ms; what takes the rest was not examined.
- **torchft** by default reduces the model tensor by tensor, between a quorum and a vote:
  {beyond(TORCHFT, fast) / 1e3:.1f} s where it takes {beyond(TORCHFT_BUCKETS, fast) / 1e3:.1f}
  with `use_bucketization`, and gradwire's `DiLoCo` {beyond(RAW, fast) / 1e3:.1f}. The losses of
  torchft and gradwire are the same ({loss(TORCHFT, STEPS):.3f} and {loss(RAW, STEPS):.3f} at the
  end with seed 0).
- **hivemind**'s exchange takes {beyond(HIVEMIND, slow) / 1e3:.1f} s at 10 Mbit/s where gradwire's
  DiLoCo takes {beyond(RAW, slow) / 1e3:.1f} with `raw` and {beyond(EIGHT_BITS, slow) / 1e3:.1f}
  with `int8`. hivemind's replicas end with different parameters.
- **gradwire's `small` loses in DiLoCo**: with seed 0 it ends at {loss(SMALL, STEPS):.2f}, `raw` at
  {loss(RAW, STEPS):.2f}. On the way its loss rises, from {loss(SMALL, 240):.2f} after 240 steps
  to {loss(SMALL, 510):.2f} after 510. So with an outer optimizer `LocalSteps` takes `half-byte`
  where no codec is given.
- **Four and more local steps end worse than DDP** in so few steps, in the mean, whoever does them;
  to a loss of {TARGETS[-1]:g} none comes that exchanges more rarely than every four steps."""
    return "\n".join(_bullet(each) for each in said[2:].split("\n- ")) + "\n"


def _filled(words: str) -> str:
    return fill(words, 100, break_on_hyphens=False)


def _bullet(words: str) -> str:
    line = "- " + " ".join(words.split())
    return fill(line, 100, subsequent_indent="  ", break_on_hyphens=False)


def _confirmed(found: Measured) -> str:
    rows, shares, slower = [], [], []
    for line in found.lines:
        if line["kind"] == "whole":
            way, link = line["way"], line["bandwidth"]
            steps, seconds, _ = line["evaluations"][-1]
            here, plain = (found.of("link", each, bandwidth=link)[0] for each in (way, DDP))
            parts = (here["step_seconds"], plain["step_seconds"], WAYS[way].plain_steps)
            numbers = f"{steps:g}", f"{seconds:.0f}", f"{total(steps, *parts):.0f}"
            sent = f"{line['sent_bytes'] / 1e6:.3g}", f"{steps * here['step_bytes'] / 1e6:.3g}"
            rows.append([_named(way), LINKS_IN_WORDS[link], *numbers, *sent])
            shares.append(steps * here["step_bytes"] / line["sent_bytes"])
            slower.append(seconds / total(steps, *parts))
    made = table(("way", "link", "steps", "s", "s computed", "MB", "MB computed"), rows)
    if not shares:
        return made
    said = _filled(
        f"Whole runs take {_span(slower)} of the computed time. MB computed from the first steps "
        f"are {_span(shares)} of those of the whole run. Ways without one have no others."
    )
    return f"{made}\n\n{said}"


def _span(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def quoted(found: Measured, names: Mapping[str, str]) -> str:
    """Some of the ways, under these names, behind links of 100 Mbit/s."""
    link = LINKS[1]
    rows = []
    for way, name in names.items():
        times = [found.cost(way, link, "step_seconds", target) for target in TARGETS]
        seconds = [_MISSING if each is None else f"{each:.0f} s" for each in times]
        sent = f"{found.sent(way) / 1e6:,.0f} MB"
        rows.append([name, *seconds, f"{fmean(found.losses(way)):.2f}", sent])
    heads = [f"to {target:g}" for target in TARGETS]
    return table((f"{LINKS_IN_WORDS[link]}, {ONE_WAY_MS} ms", *heads, "final loss", "sent"), rows)


def quote(found: Measured) -> None:
    """Replaces the tables of the pages that quote."""
    for page, names in QUOTES.items():
        new = quoted(found, names)
        words = page.read_text(encoding="utf-8")
        head = new.partition("\n")[0]
        begin = words.index(head)
        end = words.index("\n\n", begin)
        page.write_text(words[:begin] + new.rstrip("\n") + words[end:], encoding="utf-8")


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
        _bullet(f"**{way}**: {why}. It needs {needed}.") for way, (why, needed) in NOT_RUN.items()
    ]
    if missing := [name for name in WAYS if name not in found.ways]:
        parts += [_bullet(f"Not yet, about three minutes each: {'; '.join(missing)}.")]
    if open_ways := [name for name, tried in found.tried.items() if next_rate(tried)]:
        said = "The next learning rate of these, a minute or two each"
        parts += [_bullet(f"{said}: {'; '.join(map(_named, open_ways))}.")]
    if untimed := [name for name in found.ways if not found.of("link", name)]:
        said = "Not timed yet (all links are timed on one machine, one after the other)"
        parts += [_bullet(f"{said}: {'; '.join(map(_named, untimed))}.")]
    parts += [""]
    parts += [SETTINGS, RATES, _rates(found), "", ABOUT, "", _confirmed(found), "", REFEREE]
    for kind, did in (("link", "Timed"), ("train", "Trained")):
        if not (these := [line for line in lines if line["kind"] == kind]):
            continue
        # Older lines name the commit of the compiled core alone.
        commits = {line.get("commit", line["build"]["commit"]) for line in these}
        machines = " and ".join(sorted({line["machine"]["cpu"] for line in these}))
        cores = these[0]["machine"]["cores"]
        at = fill(f"{did} at {', '.join(sorted(commits))} on {cores} cores ({machines}).", 100)
        parts += ["", at]
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
    found = Measured(lines)
    draw(found, PICTURE)
    quote(found)
