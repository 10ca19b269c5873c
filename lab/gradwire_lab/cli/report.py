"""``gradwire report``."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from typer import Argument, Option

from gradwire.cli.output import JsonOption, print_json, print_table, say, significant, warn
from gradwire_lab.train import page
from gradwire_lab.train.report import mean_of
from gradwire_lab.train.results import Series, Task, read_documents, reports_of, tasks_of

_PLACES_HELP = "Results of `gradwire train`: files, and folders with a file of each run."
_PAGE_HELP = (
    "Write a web page there, with a section for each group of runs with the same settings: one "
    "file with interactive pictures that needs no network."
)


def report(
    places: Annotated[list[Path], Argument(metavar="PATH...", help=_PLACES_HELP)],
    page_path: Annotated[Path | None, Option("--html", metavar="PATH", help=_PAGE_HELP)] = None,
    plots: Annotated[
        Path | None, Option(metavar="DIR", help="Write the frontier of each task there (PNG).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare finished trainings: the metric at the end, bits a value, seconds, over all seeds."""
    if page_path is not None:
        page.check(page_path)
    documents = read_documents(places)
    tasks = tasks_of(documents)
    for name in (name for task in tasks for name in task.replaced):
        warn(f"{name}: there are several results with the same settings, and the last one counts")
    if as_json:
        print_json({"tasks": [_described(task) for task in tasks]})
    else:
        for task in tasks:
            _print(task)
    written = []
    if page_path is not None:
        machines = [document["machine"] for document in documents]
        page.write(reports_of(documents), machines, page_path)
        written.append(page_path)
    if plots is not None:
        from gradwire_lab.train.plots import write_frontiers

        written += write_frontiers(tasks, plots)
    if written and not as_json:
        say("\n".join(f"wrote {path}" for path in written))


def _described(task: Task) -> dict[str, Any]:
    return {
        "model": task.model,
        "data": task.data,
        "metric": task.metric.name,
        "times": task.times,
        "series": [_numbers(one) for one in task.series],
    }


def _numbers(series: Series) -> dict[str, Any]:
    finals = series.finals
    return {
        "label": series.label,
        "runs": len(series.runs),
        "diverged": sum(run.diverged is not None for run in series.runs),
        "failed": sum(bool(run.failed) for run in series.runs),
        "mean": fmean(finals) if finals else None,
        "lowest": min(finals, default=None),
        "highest": max(finals, default=None),
        "seconds": mean_of(series.runs, lambda run: run.seconds),
        "push_bits": mean_of(series.runs, lambda run: run.push_bits_per_value),
        "pull_bits": mean_of(series.runs, lambda run: run.pull_bits_per_value),
        "push_payload_bits": mean_of(series.runs, lambda run: run.push_payload_bits),
        "pull_payload_bits": mean_of(series.runs, lambda run: run.pull_payload_bits),
    }


def _print(task: Task) -> None:
    def value(number: float | None) -> str:
        return "-" if number is None else task.metric.text(number)

    say(f"{task.model} on {task.data}: {task.metric.title}")
    rows = []
    for series in task.series:
        n = _numbers(series)
        bits = [significant(n[key]) for key in ("push_bits", "pull_bits")]
        payload = [significant(n[key]) for key in ("push_payload_bits", "pull_payload_bits")]
        metric = [value(n[key]) for key in ("mean", "lowest", "highest")]
        seconds = "-" if n["seconds"] is None else f"{n['seconds']:.1f}"
        states = (n["runs"], n["diverged"], n["failed"])
        rows.append((n["label"], *states, *metric, *bits, *payload, seconds))
    columns = ("codec", "runs", "diverged", "failed", "mean", "lowest", "highest")
    bits_of = ("bits push", "bits pull", "payload push", "payload pull")
    print_table((*columns, *bits_of, "seconds"), rows)
    say(f"seconds: of a run, the mean of those that came to their end; {task.times}")
