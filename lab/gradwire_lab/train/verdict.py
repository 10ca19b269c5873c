"""A training in a sentence: what came first to the goal, and with what it ended."""

from __future__ import annotations

from gradwire_lab.train.report import Report, mean_of


def verdict(report: Report) -> str:
    """Compares with the first codec, which is the baseline. Empty for a single codec, and for a
    baseline that came to no end."""
    by_codec = report.by_codec()
    first, *others = by_codec
    ends = {codec: mean_of(of, lambda run: run.final) for codec, of in by_codec.items()}
    if not others or report.goal is None or (baseline := ends[first]) is None:
        return ""
    text = report.settings.metric.text
    goal = text(report.goal)
    times = {
        codec: time
        for codec in by_codec
        if ends[codec] is not None and (time := report.mean_time_to_goal(codec)) is not None
    }
    modelled = " (modelled times)" * report.conditions.modelled
    if not times:
        return f"None came to {goal}; {first} ended with {text(baseline)}."
    fastest = min(times, key=times.__getitem__)
    if fastest == first:
        rest = sorted((time, codec) for codec, time in times.items() if codec != first)
        next_one = f"; next came {rest[0][1]}, after {rest[0][0]:.1f} s" if rest else ""
        return (
            f"{first} came to {goal} first, after {times[first]:.1f} s{modelled}, so compression "
            f"did not pay here{next_one}. {first} ended with {text(baseline)}."
        )
    before = (
        f"{times[first] / times[fastest]:.1f} times as fast as {first} ({times[first]:.1f} s)"
        if first in times
        else f"where {first} did not come"
    )
    end = ends[fastest]
    assert end is not None
    return (
        f"{fastest} came to {goal} first, after {times[fastest]:.1f} s{modelled}, {before}; it "
        f"ended with {text(end)}, {first} with {text(baseline)}."
    )
